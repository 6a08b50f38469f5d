-- audit_page: one page of a list of a conversation, with the generation it belongs to. A page ends early when it has
-- become large. Writes nothing.
--
-- KEYS   1 summary   2 list
-- ARGV   1 first index   2 index after the last   3 bytes after which a page ends
-- RETURNS {generation or '', {entries}}
local summary, list = KEYS[1], KEYS[2]
local first, stop, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local AT_ONCE = 50

local generation = not wrong_type(summary, 'hash') and redis.call('HGET', summary, 'generation') or ''
local entries, bytes = {}, 0
if wrong_type(list, 'list') then return {generation, entries} end
while first < stop and bytes < most_bytes do
  local some = redis.call('LRANGE', list, first, math.min(first + AT_ONCE, stop) - 1)
  if #some == 0 then break end
  for _, entry in ipairs(some) do
    entries[#entries + 1] = entry
    bytes = bytes + #entry
  end
  first = first + #some
end
return {generation, entries}
