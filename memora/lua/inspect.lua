-- inspect: one consistent picture of a conversation. Writes nothing.
--
-- KEYS   1 history   2 summary   3 pending
-- ARGV   1 id   2 most messages of the tail (even)   3 most messages of the history, summarized or not
-- RETURNS {} if there is no such conversation, else {{the whole summary hash}, due time in ms or '', {newest of the tail},
--         {newest of the history}}
local history, summary, pending = KEYS[1], KEYS[2], KEYS[3]
local id, most, wide = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local state, problem = read_state(history, summary)
problem = problem or wrong_type(pending, 'zset')
if problem then return problem end
if not state then return {} end
local wanted = math.min(state.message_count - state.summarized_message_count, most)
local tail = wanted > 0 and redis.call('LRANGE', history, -wanted, -1) or {}
local newest = wide > 0 and redis.call('LRANGE', history, -wide, -1) or {}
return {redis.call('HGETALL', summary), redis.call('ZSCORE', pending, id) or '', tail, newest}
