-- create_conversation: begin a conversation that has no message yet, or put other metadata to one there is.
--
-- KEYS   1 history   2 summary   3 conversations
-- ARGV   1 id   2 generation   3 owner   4 metadata (JSON)   5 time to live in ms (0: none)   6 1 if it must be there already
-- RETURNS {1, created_at in ms} | {0} there is one already | {-1} there is none, or it is another's
local history, summary, conversations = KEYS[1], KEYS[2], KEYS[3]
local id, generation, owner, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl_ms, must_exist = tonumber(ARGV[5]), ARGV[6] == '1'

local state, problem = read_state(history, summary)
problem = problem or wrong_type(conversations, 'zset')
if problem then return problem end
if must_exist then
  if not state or (redis.call('HGET', summary, 'owner') or '') ~= owner then return {-1} end
  redis.call('HSET', summary, 'metadata', metadata)
  return {1, tonumber(redis.call('HGET', summary, 'created_at')) or 0}
end
if state then return {0} end
local now = now_ms()
redis.call('HSET', summary, 'summary', '', 'summarized_message_count', 0, 'version', 0, 'generation', generation,
  'summary_tokens', 0, 'created_at', digits(now), 'updated_at', digits(now), 'message_count', 0,
  'answer_input_tokens', 0, 'answer_output_tokens', 0, 'fold_input_tokens', 0, 'fold_output_tokens', 0,
  'metadata', metadata)
if owner ~= '' then redis.call('HSET', summary, 'owner', owner) end
redis.call('ZADD', conversations, digits(now), id)
if ttl_ms > 0 then
  redis.call('HSET', summary, 'expires_at', digits(now + ttl_ms))
  redis.call('PEXPIREAT', summary, digits(now + ttl_ms))
end
return {1, now}
