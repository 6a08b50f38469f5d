-- fail_fold: a fold did not come to a commit. Count what it cost and why it failed, and say when to try again.
--
-- KEYS   1 history   2 summary   3 pending   4 events
-- ARGV   1 id   2 generation   3 count the fold started from   4 fold id (makes it safe to repeat)
--        5 1 if the model answered and the answer was no summary, else 0   6 the reason, one line
--        7 fold input tokens   8 fold output tokens   9 ms until the next try   10 channel of results
-- RETURNS 1 recorded | 0 the generation or the count has moved: tokens counted, nothing else | -1 gone
local history, summary, pending, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, generation, from, fold_id, rejected = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local reason, input_tokens, output_tokens, delay_ms = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
local results = ARGV[10]

local state, problem = read_state(history, summary)
if problem then return problem end
problem = wrong_type(pending, 'zset') or wrong_type(events, 'stream')
if problem then return problem end
if not state or life_of(state.generation) ~= life_of(generation) then return -1 end
local is_current = state.generation == generation and state.summarized_message_count == from
if known_fold(summary, fold_id) then return is_current and 1 or 0 end

remember_fold(summary, fold_id, 0)
redis.call('HINCRBY', summary, 'fold_input_tokens', input_tokens)
redis.call('HINCRBY', summary, 'fold_output_tokens', output_tokens)
if not is_current then return 0 end
redis.call('HINCRBY', summary, 'fold_failures', 1)
redis.call('HINCRBY', summary, 'fold_rejections', rejected)
redis.call('HSET', summary, 'last_fold_error', reason)
redis.call('ZADD', pending, digits(now_ms() + delay_ms), id)
tell(events, '{"type":"retry","from":' .. from .. ',"retry_in_ms":' .. digits(delay_ms) .. ',"at":'
  .. digits(now_ms()) .. '}')
hint(results, 'retry')
if state.expires_at then redis.call('PEXPIREAT', events, state.expires_at) end
return 1
