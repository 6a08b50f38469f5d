-- remove_message: take back one message that no summary stands for yet. An absent one keeps its place, so that the turns
-- around it stay whole, and the conversation gets its next generation, so that a fold that was shown the message cannot
-- commit; the job of that fold is replaced by one of the new generation.
--
-- KEYS   1 history   2 summary   3 pending   4 queue   5 lock   6 events
-- ARGV   1 id   2 generation it was found in   3 its position   4 lock token, given back
--        5 what takes its place (JSON without "at")   6 grace in ms before the sweep looks after a fold
-- RETURNS 1 removed | 0 there is no message at this position | -1 deleted meanwhile | -2 the lock is another's
--         | -3 the message is summarized
local history, summary, pending, queue, lock, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, found_in, position, lock_token = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local absent, grace_ms = ARGV[5], tonumber(ARGV[6])

local state, problem = read_state(history, summary)
problem = problem or wrong_type(pending, 'zset') or wrong_type(queue, 'zset') or wrong_type(lock, 'string')
  or wrong_type(events, 'stream')
if problem then return problem end
if not state or life_of(state.generation) ~= life_of(found_in) then return -1 end
if redis.call('GET', lock) ~= lock_token then
  -- Sent again after a lost reply, it finds what it did; the lock went with it.
  local found = redis.call('LINDEX', history, position) or ''
  local beginning = string.sub(absent, 1, -2)
  return string.sub(found, 1, #beginning) == beginning and 1 or -2
end
local folded = state.summarized_message_count
if position >= state.message_count then return 0 end
if position < folded then return -3 end

local old_job, new_generation = job_of(id, state.generation, folded), next_generation(state.generation)
reach(old_job)
local now = now_ms()
-- The first write is the one that a full Redis refuses, before anything has changed.
redis.call('HSET', summary, 'generation', new_generation, 'updated_at', digits(now))
redis.call('LSET', history, position, string.sub(absent, 1, -2) .. ',"at":' .. digits(now) .. '}')
redis.call('DEL', lock)
redis.call('ZREM', queue, old_job)
redis.call('DEL', 'arq:job:' .. old_job, 'arq:retry:' .. old_job)
if redis.call('ZSCORE', pending, id) then
  redis.call('ZADD', pending, digits(now + grace_ms), id)
  enqueue(queue, id, new_generation, folded)
end
tell(events, '{"type":"removed","position":' .. position .. ',"at":' .. digits(now) .. '}')
if state.expires_at then redis.call('PEXPIREAT', events, state.expires_at) end
return 1
