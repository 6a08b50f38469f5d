-- load_context: everything one answer needs, read in one step, from the summarized count on. Writes nothing.
--
-- KEYS   1 history   2 summary
-- ARGV   1 most messages of the tail that could be of use (even)
-- RETURNS {} if there is no such conversation, else
--         {generation, message_count, summarized_message_count, version, summary, summary_tokens,
--          the four usage counters, {messages}}
local history, summary = KEYS[1], KEYS[2]
local most = tonumber(ARGV[1])

local state, problem = read_state(history, summary)
if problem then return problem end
if not state then return {} end
local s = redis.call('HMGET', summary, 'summary', 'summary_tokens', 'answer_input_tokens', 'answer_output_tokens',
  'fold_input_tokens', 'fold_output_tokens')
local wanted = math.min(state.message_count - state.summarized_message_count, most)
local tail = wanted > 0 and redis.call('LRANGE', history, -wanted, -1) or {}
return {state.generation, state.message_count, state.summarized_message_count, state.version, s[1] or '',
  tonumber(s[2]) or 0, tonumber(s[3]) or 0, tonumber(s[4]) or 0, tonumber(s[5]) or 0, tonumber(s[6]) or 0, tail}
