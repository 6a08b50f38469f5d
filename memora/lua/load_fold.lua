-- load_fold: what a fold starts from, read in one step: the oldest messages the summary does not cover, and the newest
-- ones, which decide how far the window reaches. Writes nothing.
--
-- KEYS   1 history   2 summary
-- ARGV   1 most messages to fold at once (even)   2 most messages a window can hold (even)
-- RETURNS {} if there is no such conversation, else
--         {generation, message_count, summarized_message_count, version, summary, summary_tokens, failures, rejections,
--          messages in the window of the last turn, {oldest messages of the tail}, {newest messages of the tail}}
local history, summary = KEYS[1], KEYS[2]
local most, window = tonumber(ARGV[1]), tonumber(ARGV[2])

local state, problem = read_state(history, summary)
if problem then return problem end
if not state then return {} end
local folded, count = state.summarized_message_count, state.message_count
local s = redis.call('HMGET', summary, 'summary', 'summary_tokens', 'fold_failures', 'fold_rejections',
  'window_messages')
local oldest = redis.call('LRANGE', history, folded, math.min(folded + most, count) - 1)
local reach = math.min(window, count - folded)
local newest = reach > 0 and redis.call('LRANGE', history, -reach, -1) or {}
return {state.generation, count, folded, state.version, s[1] or '', tonumber(s[2]) or 0, tonumber(s[3]) or 0,
  tonumber(s[4]) or 0, tonumber(s[5]) or window, oldest, newest}
