-- release_lock: give a lock back, if it is still ours.
--
-- KEYS   1 lock
-- ARGV   1 lock token
-- RETURNS 1 given back | 0 it is another's, or nobody's
local lock = KEYS[1]
local token = ARGV[1]
if redis.call('GET', lock) ~= token then return 0 end
return redis.call('DEL', lock)
