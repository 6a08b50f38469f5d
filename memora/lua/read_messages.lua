-- read_messages: one page of the history, with the life it belongs to. Writes nothing.
--
-- KEYS   1 history   2 summary
-- ARGV   1 first position   2 position after the last
-- RETURNS {} if there is no such conversation, else {life, message_count, {messages}, created_at in ms, owner,
--         metadata (JSON or '')}
local history, summary = KEYS[1], KEYS[2]
local state, problem = read_state(history, summary)
if problem then return problem end
if not state then return {} end
local first, stop = tonumber(ARGV[1]), tonumber(ARGV[2])
local s = redis.call('HMGET', summary, 'created_at', 'owner', 'metadata')
return {life_of(state.generation), state.message_count, stop > first and redis.call('LRANGE', history, first, stop - 1) or {},
  tonumber(s[1]) or 0, s[2] or '', s[3] or ''}
