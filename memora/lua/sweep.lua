-- sweep: see to what is due. Conversations whose fold is overdue get their job again if it was lost, and what was put
-- off by a clock that was set back since does not wait for it; the claim of a worker that died before its first renewal
-- is cut down to a lease; entries of expired conversations are dropped, and so are names in the queue that no worker
-- could read.
--
-- KEYS   1 pending   2 conversations   3 queue
-- ARGV   1 most conversations to look at   2 ms until they are looked at again   3 lease in ms
--        4 key prefix up to the id   5 key suffix of a summary
-- RETURNS {due, enqueued, dropped}
local pending, conversations, queue = KEYS[1], KEYS[2], KEYS[3]
local most, again_ms, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local prefix, suffix = ARGV[4], ARGV[5]
local LONGEST_WAIT_MS = 600000

local problem = wrong_type(pending, 'zset') or wrong_type(conversations, 'zset') or wrong_type(queue, 'zset')
if problem then return problem end
local now = now_ms()
local enqueued, dropped = 0, 0
local due = redis.call('ZRANGEBYSCORE', pending, '-inf', digits(now), 'LIMIT', 0, most)
-- Nothing is ever put off for so long: the clock was set back since, and all of this would wait for it to come round.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', pending, digits(now + LONGEST_WAIT_MS), '+inf', 'LIMIT', 0, most)) do
  due[#due + 1] = id
end
for _, id in ipairs(due) do
  local summary = prefix .. id .. suffix
  local kind = redis.call('TYPE', summary).ok
  if kind == 'none' then
    redis.call('ZREM', pending, id)
    dropped = dropped + 1
  else
    redis.call('ZADD', pending, digits(now + again_ms), id)
    local state = kind == 'hash' and redis.call('HMGET', summary, 'generation', 'summarized_message_count') or {}
    if state[1] and state[2] then
      local claim = 'arq:in-progress:' .. job_of(id, state[1], state[2])
      if redis.call('PTTL', claim) > lease_ms then redis.call('PEXPIRE', claim, lease_ms) end
      if enqueue(queue, id, state[1], state[2]) then enqueued = enqueued + 1 end
      -- One that waits already may have been put there before the clock was set back.
      redis.call('ZADD', queue, 'XX', 'LT', digits(now - CLOCK_ALLOWANCE_MS), job_of(id, state[1], state[2]))
    end
  end
end
-- Oldest first: what expired is found here, a few at a time.
for _, id in ipairs(redis.call('ZRANGE', conversations, 0, most - 1)) do
  if redis.call('EXISTS', prefix .. id .. suffix) == 0 then
    redis.call('ZREM', conversations, id)
    dropped = dropped + 1
  end
end
-- arq decodes every name as text, and one that is none would end each worker that comes to it.
for _, job in ipairs(redis.call('ZRANGE', queue, 0, most - 1)) do
  if string.find(job, '[\128-\255]') then redis.call('ZREM', queue, job) end
end
return {#due, enqueued, dropped}
