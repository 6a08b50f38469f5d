-- begin_turn: take the conversation's lock for one turn and load what its answer needs, in one step; or find that the turn
-- is there already, or that it is another's turn.
--
-- The lock is a lease that dies with its holder. A retry that carries no turn id is recognised as the newest turn by the
-- fingerprint of its request.
--
-- KEYS   1 history   2 summary   3 turns   4 lock
-- ARGV   1 lock token   2 lease in ms   3 turn id   4 fingerprint of the request, '' unless it may be a blind retry
--        5 most messages of the tail that could be of use (even)   6 owner   7 1 if a new conversation may be begun
-- RETURNS {-1} no such conversation, or another's | {0, ms left of the lock that is held}
--         {1, generation or '', message_count, summarized_message_count, version, summary, summary_tokens,
--          the four usage counters, {messages}, created_at in ms} the lock is taken
--         {2, generation, position of the user's message, user's message, assistant's message, created_at in ms} the turn
--         is there already
local history, summary, turns, lock = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, lease_ms, turn_id, fingerprint = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local most, owner, may_begin = tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1'

local state, problem = read_state(history, summary)
problem = problem or wrong_type(turns, 'zset') or wrong_type(lock, 'string')
if problem then return problem end
if not state and not may_begin then return {-1} end
if state and (redis.call('HGET', summary, 'owner') or '') ~= owner then return {-1} end

local holder = redis.call('GET', lock)
local stored_at = redis.call('ZSCORE', turns, turn_id)
if not stored_at and fingerprint ~= '' and state and state.message_count > 0 and not holder then
  local newest = redis.call('LINDEX', history, -2)
  if string.find(newest, '"fingerprint":"' .. fingerprint .. '"', 1, true) then stored_at = state.message_count end
end
if stored_at then
  local position = tonumber(stored_at) - 2
  local pair = redis.call('LRANGE', history, position, position + 1)
  return {2, state.generation, position, pair[1], pair[2], tonumber(redis.call('HGET', summary, 'created_at')) or 0}
end
if holder and holder ~= token then
  -- All leases are alike, so only a clock that stepped back leaves one with more time than that.
  if redis.call('PTTL', lock) > lease_ms then redis.call('PEXPIRE', lock, lease_ms) end
  return {0, math.max(redis.call('PTTL', lock), 1)}
end
redis.call('SET', lock, token, 'PX', lease_ms)
if not state then return {1, '', 0, 0, 0, '', 0, 0, 0, 0, 0, {}, 0} end
local s = redis.call('HMGET', summary, 'summary', 'summary_tokens', 'answer_input_tokens', 'answer_output_tokens',
  'fold_input_tokens', 'fold_output_tokens', 'created_at')
local wanted = math.min(state.message_count - state.summarized_message_count, most)
local tail = wanted > 0 and redis.call('LRANGE', history, -wanted, -1) or {}
return {1, state.generation, state.message_count, state.summarized_message_count, state.version, s[1] or '',
  tonumber(s[2]) or 0, tonumber(s[3]) or 0, tonumber(s[4]) or 0, tonumber(s[5]) or 0, tonumber(s[6]) or 0, tail,
  tonumber(s[7]) or 0}
