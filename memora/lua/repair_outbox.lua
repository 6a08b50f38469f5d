-- repair_outbox: put a conversation with pending messages into the outbox, due now, and enqueue its fold; enqueue it too
-- for one that is listed with nothing to fold: that fold takes it out. One that is not there is taken out at once.
--
-- KEYS   1 history   2 summary   3 pending   4 queue
-- ARGV   1 id   2 grace in ms before the sweep looks after a fold
-- RETURNS 1 repaired | 0 nothing to repair
local history, summary, pending, queue = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, grace_ms = ARGV[1], tonumber(ARGV[2])

if wrong_type(pending, 'zset') or wrong_type(queue, 'zset') then return 0 end
if redis.call('EXISTS', history, summary) == 0 then return redis.call('ZREM', pending, id) end
local state = read_state(history, summary)
if not state then return 0 end
local window = whole_number(redis.call('HGET', summary, 'window_messages') or '') or 0
local due = redis.call('ZSCORE', pending, id)
if not due and state.message_count - window <= state.summarized_message_count then return 0 end
redis.call('ZADD', pending, digits(now_ms() + grace_ms), id)
enqueue(queue, id, state.generation, state.summarized_message_count)
return 1
