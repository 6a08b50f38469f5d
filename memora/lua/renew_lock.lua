-- renew_lock: keep a lock that is still ours.
--
-- KEYS   1 lock
-- ARGV   1 lock token   2 lease in ms
-- RETURNS 1 kept | 0 it is another's, or nobody's
local lock = KEYS[1]
local token, lease_ms = ARGV[1], tonumber(ARGV[2])
if redis.call('GET', lock) ~= token then return 0 end
return redis.call('PEXPIRE', lock, lease_ms)
