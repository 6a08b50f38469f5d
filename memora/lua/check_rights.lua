-- check_rights: whether the Redis user may do what conversations and their fold jobs take. Changes nothing.
--
-- KEYS   none: the names are of keys that nobody has
-- ARGV   none
-- RETURNS the first thing that is forbidden, as "COMMAND key"; '' if nothing is, or if this Redis (before 7) cannot say
if not redis.acl_check_cmd then return '' end
local NEEDED = {
  {'HSET', 'memora:{0}:-:summary', 'f', 'v'}, {'HGETALL', 'memora:{0}:-:summary'},
  {'RPUSH', 'memora:{0}:-:history', 'v'}, {'LRANGE', 'memora:{0}:-:history', 0, 1},
  {'ZADD', 'memora:{0}:pending', 1, 'm'}, {'XADD', 'memora:{0}:-:events', '*', 'f', 'v'},
  {'UNLINK', 'memora:{0}:-:history'}, {'SET', 'memora:{0}:-:lock', 'v'},
  {'PSETEX', 'arq:job:-', 1, 'v'}, {'GET', 'arq:job:-'}, {'DEL', 'arq:job:-'},
  {'PSETEX', 'arq:in-progress:-', 1, 'v'}, {'SET', 'arq:in-progress:-', 'v'}, {'INCR', 'arq:retry:-'},
  {'PSETEX', 'arq:result:-', 1, 'v'}
}
for _, words in ipairs(NEEDED) do
  if not redis.acl_check_cmd(unpack(words)) then return words[1] .. ' ' .. words[2] end
end
return ''
