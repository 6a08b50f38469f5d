-- repair_index: list a conversation that is there, by its last activity; take one off the list that is not.
--
-- KEYS   1 history   2 summary   3 conversations
-- ARGV   1 id
-- RETURNS 1 repaired | 0 nothing to repair
local history, summary, conversations = KEYS[1], KEYS[2], KEYS[3]
local id = ARGV[1]

if wrong_type(conversations, 'zset') then return 0 end
if redis.call('EXISTS', history, summary) == 0 then return redis.call('ZREM', conversations, id) end
if redis.call('ZSCORE', conversations, id) then return 0 end
local active = not wrong_type(summary, 'hash') and whole_number(redis.call('HGET', summary, 'updated_at') or '')
return redis.call('ZADD', conversations, digits(active or now_ms()), id)
