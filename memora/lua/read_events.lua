-- read_events: what has happened to a conversation since an event. Writes nothing.
--
-- KEYS   1 history   2 summary   3 events
-- ARGV   1 id of the last event seen, or ''   2 most events
-- RETURNS {} if there is no such conversation, else {life, id of the newest event or '', {{event id, event JSON}}}
local history, summary, events = KEYS[1], KEYS[2], KEYS[3]
local last, most = ARGV[1], tonumber(ARGV[2])

local state, problem = read_state(history, summary)
problem = problem or wrong_type(events, 'stream')
if problem then return problem end
if not state then return {} end
local newest = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)
local found = {}
if last ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', events, '(' .. last, '+', 'COUNT', most)) do
    found[#found + 1] = {entry[1], entry[2][2]}
  end
end
return {life_of(state.generation), newest[1] and newest[1][1] or '', found}
