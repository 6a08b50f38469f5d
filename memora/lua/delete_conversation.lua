-- delete_conversation: leave no key of a conversation behind, its fold job included. A fold in flight can then no longer
-- commit, because its generation is gone. Works on damaged conversations too.
--
-- KEYS   1 history   2 summary   3 folds   4 turns   5 context   6 conversations   7 pending   8 queue
--        9 lock   10 events
-- ARGV   1 id
-- RETURNS 1 if there was anything to delete, else 0
local history, summary, folds, turns, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local conversations, pending, queue, lock, events = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local id = ARGV[1]

-- A list of all conversations that is damaged itself is not this one's matter.
local function take_off(list, member)
  return wrong_type(list, 'zset') and 0 or redis.call('ZREM', list, member)
end

local function forget_job(job)
  redis.call('DEL', 'arq:job:' .. job, 'arq:retry:' .. job, 'arq:in-progress:' .. job, 'arq:result:' .. job)
  take_off(queue, job)
end

local readable = not wrong_type(summary, 'hash')
local state = readable and redis.call('HMGET', summary, 'generation', 'summarized_message_count') or {}
if state[1] and state[2] then
  forget_job(job_of(id, state[1], state[2]))
elseif redis.call('EXISTS', history, summary) > 0 and not wrong_type(queue, 'zset') then
  -- The state that would name the job is damaged, so the queue is searched for it.
  local beginning = 'fold:' .. id .. ':'
  for _, job in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
    if string.sub(job, 1, #beginning) == beginning then forget_job(job) end
  end
end
local keys = redis.call('UNLINK', history, summary, folds, turns, context, lock, events)
hint(events, 'deleted')
return (keys + take_off(conversations, id) + take_off(pending, id)) > 0 and 1 or 0
