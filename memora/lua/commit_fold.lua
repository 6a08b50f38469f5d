-- commit_fold: make a fold real, if nothing it started from has changed: first the generation is compared, then the
-- count. Tokens are counted even when the fold loses, as long as the conversation it was made for lives. If more is
-- pending, its job is enqueued under the new count.
--
-- KEYS   1 history   2 summary   3 folds   4 pending   5 queue   6 events
-- ARGV   1 id   2 generation   3 count the fold started from   4 count it reaches   5 fold id (makes it safe to repeat)
--        6 new summary   7 its tokens   8 audit entry (JSON object without "at")   9 fold input tokens
--        10 fold output tokens   11 messages in the window   12 grace in ms before the sweep looks after a fold
--        13 channel of results   14 messages the window may grow to before it falls back to 11 (0: it does not grow)
-- RETURNS {1 committed | 0 stale | -1 gone, summarized_message_count, version, pending}
local history, summary, folds, pending, queue, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, generation, from, to, fold_id = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local text, text_tokens, entry = ARGV[6], ARGV[7], ARGV[8]
local input_tokens, output_tokens = ARGV[9], ARGV[10]
local window, grace_ms, results = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local most_window = tonumber(ARGV[14])

local state, problem = read_state(history, summary)
if problem then return problem end
problem = wrong_type(folds, 'list') or wrong_type(pending, 'zset') or wrong_type(queue, 'zset')
  or wrong_type(events, 'stream')
if problem then return problem end
if not state or life_of(state.generation) ~= life_of(generation) then return {-1, 0, 0, 0} end

local count = state.message_count
-- A turn that came while the summary was made may have found a smaller window.
local found_window = tonumber(redis.call('HGET', summary, 'window_messages'))
if found_window and found_window < window then window, most_window = found_window, 0 end
local function window_after(folded) return held(count - folded, window, most_window) end
local function left_over(folded) return math.max(0, count - folded - window_after(folded)) end

local known = known_fold(summary, fold_id)
if known then
  return {tonumber(known) or 0, state.summarized_message_count, state.version,
    left_over(state.summarized_message_count)}
end
if state.generation ~= generation or state.summarized_message_count ~= from then
  redis.call('HINCRBY', summary, 'fold_input_tokens', input_tokens)
  redis.call('HINCRBY', summary, 'fold_output_tokens', output_tokens)
  redis.call('HINCRBY', summary, 'fold_conflicts', 1)
  remember_fold(summary, fold_id, 0)
  tell(events, '{"type":"conflict","from":' .. from .. ',"to":' .. to .. ',"summarized_message_count":'
    .. state.summarized_message_count .. ',"at":' .. digits(now_ms()) .. '}')
  hint(results, 'conflict')
  if state.expires_at then redis.call('PEXPIREAT', events, state.expires_at) end
  return {0, state.summarized_message_count, state.version, left_over(state.summarized_message_count)}
end
if to <= from or to > count then
  return redis.error_reply('ERR a fold from ' .. from .. ' cannot reach ' .. to .. ' of ' .. count)
end
if redis.call('LLEN', folds) ~= state.version then
  return damaged(folds, 'does not hold the ' .. state.version .. ' folds that ' .. summary .. ' counts')
end

reach(job_of(id, generation, from))
local now = now_ms()
-- The first write is the one that a full Redis refuses, before anything has changed.
redis.call('RPUSH', folds, string.sub(entry, 1, -2) .. ',"at":' .. digits(now) .. '}')
redis.call('HSET', summary, 'summary', text, 'summary_tokens', text_tokens, 'summarized_message_count', to,
  'version', state.version + 1, 'updated_at', digits(now), 'window_messages', window_after(to))
remember_fold(summary, fold_id, 1)
redis.call('HINCRBY', summary, 'fold_input_tokens', input_tokens)
redis.call('HINCRBY', summary, 'fold_output_tokens', output_tokens)
redis.call('HDEL', summary, 'fold_failures', 'fold_rejections', 'last_fold_error')
-- The job this fold was made for has nothing left to do, wherever it is.
redis.call('ZREM', queue, job_of(id, generation, from))
redis.call('DEL', 'arq:job:' .. job_of(id, generation, from), 'arq:retry:' .. job_of(id, generation, from))
tell(events, '{"type":"fold","from":' .. from .. ',"to":' .. to .. ',"version":' .. (state.version + 1)
  .. ',"summary_tokens":' .. text_tokens .. ',"pending_messages":' .. left_over(to) .. ',"at":' .. digits(now) .. '}')
hint(results, 'fold')
if state.expires_at then for _, key in ipairs({folds, events}) do redis.call('PEXPIREAT', key, state.expires_at) end end
if left_over(to) > 0 then
  redis.call('ZADD', pending, digits(now + grace_ms), id)
  enqueue(queue, id, generation, to)
else
  redis.call('ZREM', pending, id)
end
return {1, to, state.version + 1, left_over(to)}
