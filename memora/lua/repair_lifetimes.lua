-- repair_lifetimes: let all keys of a conversation expire when it says it does, or never if it says nothing; a lock always.
-- What should have expired already is left: deleting is not repairing.
--
-- KEYS   1 summary   2 lock   3... the other keys
-- ARGV   1 expires_at that was found, '' for none   2 longest time of a lock in ms
-- RETURNS 1 repaired | 0 it has changed meanwhile, or is over
local summary, lock = KEYS[1], KEYS[2]
local expires_at, lock_ms = ARGV[1], ARGV[2]

if wrong_type(summary, 'hash') or (redis.call('HGET', summary, 'expires_at') or '') ~= expires_at then return 0 end
local repaired = redis.call('PTTL', lock) == -1 and redis.call('PEXPIRE', lock, lock_ms) or 0
if expires_at ~= '' and (whole_number(expires_at) or 0) <= now_ms() then return repaired end
for i, key in ipairs(KEYS) do
  if i ~= 2 then
    if expires_at == '' then redis.call('PERSIST', key) else redis.call('PEXPIREAT', key, expires_at) end
  end
end
return 1
