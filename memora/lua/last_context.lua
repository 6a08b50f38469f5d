-- last_context: what was sent for the last answer. The record names the parts; the parts are read from where they are
-- kept, in the same step. Writes nothing.
--
-- KEYS   1 history   2 summary   3 folds   4 context
-- RETURNS {} if there is no such conversation or nothing was sent, else
--         {record, audit entry whose summary was sent or '', {tail as sent}, the user's message}
local history, summary, folds, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local state, problem = read_state(history, summary)
problem = problem or wrong_type(folds, 'list') or wrong_type(context, 'string')
if problem then return problem end
local record = state and redis.call('GET', context)
if not record then return {} end
local readable, sent = pcall(cjson.decode, record)
local numbers = readable and type(sent) == 'table'
for _, name in ipairs({'summary_version', 'tail_start', 'tail_messages', 'position'}) do
  numbers = numbers and type(sent[name]) == 'number' and sent[name] % 1 == 0
end
if not numbers then return damaged(context, 'is not a context record') end
local by_version = sent.summary_version > 0 and not sent.summary
local entry = by_version and redis.call('LINDEX', folds, sent.summary_version - 1) or ''
local tail = {}
if sent.tail_messages > 0 then
  tail = redis.call('LRANGE', history, sent.tail_start, sent.tail_start + sent.tail_messages - 1)
end
return {record, entry or '', tail, redis.call('LINDEX', history, sent.position) or ''}
