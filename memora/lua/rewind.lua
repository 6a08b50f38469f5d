-- rewind: take the summary back to an earlier version, 0 for none at all. What came after it in the audit trail is gone,
-- and its messages are pending again; the history stays. The conversation gets its next generation, so that no fold that
-- is under way can commit, and no job of before can run.
--
-- KEYS   1 history   2 summary   3 folds   4 context   5 pending   6 queue   7 events
-- ARGV   1 id   2 owner   3 version to go back to   4 grace in ms before the sweep looks after a fold
-- RETURNS {1, version before} | {0, version} there is no such version yet | {-1} no such conversation, or another's
local history, summary, folds, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local pending, queue, events = KEYS[5], KEYS[6], KEYS[7]
local id, owner, version, grace_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local state, problem = read_state(history, summary)
problem = problem or wrong_type(folds, 'list') or wrong_type(context, 'string') or wrong_type(pending, 'zset')
  or wrong_type(queue, 'zset') or wrong_type(events, 'stream')
if problem then return problem end
if not state or (redis.call('HGET', summary, 'owner') or '') ~= owner then return {-1} end
if version > state.version then return {0, state.version} end

local function entry_of(number)
  local entry = redis.call('LINDEX', folds, number - 1)
  local readable, fold = pcall(cjson.decode, entry or '')
  if readable and type(fold) == 'table' and type(fold.summary) == 'string' and type(fold.to) == 'number' then
    return fold
  end
end

local text, folded, tokens = '', 0, 0
if version > 0 then
  local fold = entry_of(version)
  if not fold or fold.to > state.message_count or fold.to % 2 == 1 or type(fold.summary_tokens) ~= 'number' then
    return damaged(folds, 'has no readable entry for version ' .. version)
  end
  text, folded, tokens = fold.summary, fold.to, fold.summary_tokens
end
-- What was sent for the last answer names its summary by version; if that one goes, its text stays in the record.
local record = redis.call('GET', context)
local readable, sent = pcall(cjson.decode, record or '')
local kept_text
if readable and type(sent) == 'table' and type(sent.summary_version) == 'number' and not sent.summary
  and sent.summary_version > version then
  local fold = entry_of(sent.summary_version)
  kept_text = fold and string.sub(record, 1, -2) .. ',"summary":' .. cjson.encode(fold.summary) .. '}'
end

local old_job = job_of(id, state.generation, state.summarized_message_count)
reach(old_job)
local now = now_ms()
local generation = next_generation(state.generation)
local window = tonumber(redis.call('HGET', summary, 'window_messages')) or 0
local waiting = math.max(0, state.message_count - window - folded)
-- The first write is the one that a full Redis refuses, before anything has changed.
redis.call('HSET', summary, 'generation', generation, 'summary', text, 'summary_tokens', tokens,
  'summarized_message_count', folded, 'version', version, 'updated_at', digits(now),
  'seen_summarized_message_count', math.min(state.numbers.seen_summarized_message_count, folded))
redis.call('HDEL', summary, 'fold_failures', 'fold_rejections', 'last_fold_error')
if version > 0 then redis.call('LTRIM', folds, 0, version - 1) else redis.call('DEL', folds) end
if kept_text then redis.call('SET', context, kept_text, 'KEEPTTL') end
redis.call('ZREM', queue, old_job)
redis.call('DEL', 'arq:job:' .. old_job, 'arq:retry:' .. old_job)
tell(events, '{"type":"rewound","version":' .. version .. ',"from_version":' .. state.version
  .. ',"summarized_message_count":' .. folded .. ',"pending_messages":' .. waiting .. ',"at":' .. digits(now) .. '}')
if state.expires_at then redis.call('PEXPIREAT', events, state.expires_at) end
if waiting > 0 then
  redis.call('ZADD', pending, digits(now + grace_ms), id)
  enqueue(queue, id, generation, folded)
else
  redis.call('ZREM', pending, id)
end
return {1, state.version}
