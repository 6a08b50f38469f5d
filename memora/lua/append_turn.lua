-- append_turn: store one whole turn, and everything that follows from it, in one step. Whole turns of an imported history
-- may stand in front of it; an import alone has no context.
--
-- A turn id that was seen before changes nothing, so a client may repeat the call after a lost reply. A turn that was
-- answered in another generation than the stored one is refused: its conversation was deleted meanwhile. A turn whose
-- lock is another's by now is refused too, and one that is stored gives its lock back.
--
-- KEYS   1 history   2 summary   3 folds   4 turns   5 context   6 conversations   7 pending   8 queue
--        9 lock   10 events
-- ARGV   1 id                   2 turn id              3 generation the turn was answered in ('' for a new conversation)
--        4 generation to use if this is the first turn 5 time to live in ms (0: none)
--        6 messages in the window                      7 grace in ms before the sweep looks after a fold
--        8 answer input tokens   9 answer output tokens   10 context record (JSON without "position"), or ''
--        11 lock token, or '' if no lock was taken       12 owner, of a new conversation
--        13 messages the window may grow to before it falls back to 6 (0: it does not grow)
--        14... messages, an even number (JSON objects without "at")
-- RETURNS {1 stored | 0 repeated | -1 deleted meanwhile | -2 the lock is another's, message_count, summarized_message_count, version, pending,
--          messages summarized since the last turn, fold tokens since the last turn,
--          the four usage counters}
local history, summary, folds, turns, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local conversations, pending, queue, lock, events = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local id, turn_id, answered_in, new_generation = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl_ms, window, grace_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local input_tokens, output_tokens, context_record = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local lock_token, owner, most_window = ARGV[11], ARGV[12], tonumber(ARGV[13])
local FIRST_MESSAGE = 14

local TURN_IDS_KEPT = 64

local state, problem = read_state(history, summary)
if problem then return problem end
problem = wrong_type(folds, 'list') or wrong_type(turns, 'zset') or wrong_type(context, 'string')
  or wrong_type(conversations, 'zset') or wrong_type(pending, 'zset') or wrong_type(queue, 'zset')
  or wrong_type(lock, 'string') or wrong_type(events, 'stream')
if problem then return problem end
if answered_in ~= '' and (not state or life_of(state.generation) ~= life_of(answered_in)) then return {-1} end

local known = state and state.numbers or {}
local function number(name) return known[name] or 0 end
local folded = state and state.summarized_message_count or 0

local function waiting(count) return math.max(0, count - folded - held(count - folded, window, most_window)) end

local function figures(status, count, newly, spent)
  return {status, count, folded, state and state.version or 0, waiting(count), newly, spent,
    number('answer_input_tokens'), number('answer_output_tokens'), number('fold_input_tokens'),
    number('fold_output_tokens')}
end

if state and redis.call('ZSCORE', turns, turn_id) then return figures(0, state.message_count, 0, 0) end
if lock_token ~= '' and redis.call('GET', lock) ~= lock_token then return {-2} end

local generation = state and state.generation or new_generation
reach(job_of(id, generation, folded))
local now = now_ms()
local at = ',"at":' .. digits(now) .. '}'
-- The first write is the one that a full Redis refuses, before anything has changed.
local messages = {}
for i = FIRST_MESSAGE, #ARGV do messages[#messages + 1] = string.sub(ARGV[i], 1, -2) .. at end
local count = redis.call('RPUSH', history, unpack(messages))
if not state then
  redis.call('HSET', summary, 'summary', '', 'summarized_message_count', 0, 'version', 0, 'generation', generation,
    'summary_tokens', 0, 'created_at', digits(now), 'fold_input_tokens', 0, 'fold_output_tokens', 0)
  if owner ~= '' then redis.call('HSET', summary, 'owner', owner) end
end
-- What the last turn had seen, so that this one can say what happened in between.
local fold_tokens = number('fold_input_tokens') + number('fold_output_tokens')
local newly, spent = folded - number('seen_summarized_message_count'), fold_tokens - number('seen_fold_tokens')
known.answer_input_tokens = number('answer_input_tokens') + input_tokens
known.answer_output_tokens = number('answer_output_tokens') + output_tokens
redis.call('HSET', summary, 'message_count', count, 'updated_at', digits(now), 'window_messages',
  held(count - folded, window, most_window),
  'answer_input_tokens', digits(known.answer_input_tokens), 'answer_output_tokens', digits(known.answer_output_tokens),
  'seen_summarized_message_count', folded, 'seen_fold_tokens', digits(fold_tokens))

redis.call('ZADD', turns, count, turn_id)
redis.call('ZREMRANGEBYRANK', turns, 0, -TURN_IDS_KEPT - 1)
if state and answered_in ~= '' and answered_in ~= state.generation then
  -- The record names its summary by a version that may be another's by now.
  redis.call('DEL', context)
elseif context_record ~= '' then
  redis.call('SET', context, string.sub(context_record, 1, -2) .. ',"position":' .. (count - 2) .. '}')
end
if lock_token ~= '' then redis.call('DEL', lock) end
tell(events, '{"type":"turn","message_count":' .. count .. ',"summarized_message_count":' .. folded
  .. ',"pending_messages":' .. waiting(count) .. ',"at":' .. digits(now) .. '}')
redis.call('ZADD', conversations, digits(now), id)

if ttl_ms > 0 then
  local expires_at = digits(now + ttl_ms)
  redis.call('HSET', summary, 'expires_at', expires_at)
  for _, key in ipairs({history, summary, folds, turns, context, events}) do redis.call('PEXPIREAT', key, expires_at) end
elseif state and state.expires_at then
  redis.call('HDEL', summary, 'expires_at')
  for _, key in ipairs({history, summary, folds, turns, context, events}) do redis.call('PERSIST', key) end
end

if waiting(count) > 0 then
  redis.call('ZADD', pending, 'NX', digits(now + grace_ms), id)
  enqueue(queue, id, generation, folded)
end
return figures(1, count, newly, spent)
