-- delete_conversation: leave no key of a conversation behind, its fold job included. A fold in flight can then no longer
-- commit, because its generation is gone. Works on damaged conversations too.
--
-- KEYS   1 history   2 summary   3 folds   4 turns   5 context   6 conversations   7 pending   8 queue
-- ARGV   1 id
-- RETURNS 1 if there was anything to delete, else 0
local history, summary, folds, turns, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local conversations, pending, queue = KEYS[6], KEYS[7], KEYS[8]
local id = ARGV[1]

if redis.call('TYPE', summary).ok == 'hash' then
  local state = redis.call('HMGET', summary, 'generation', 'summarized_message_count')
  local job = job_of(id, state[1] or '', state[2] or '')
  redis.call('ZREM', queue, job)
  redis.call('DEL', 'arq:job:' .. job, 'arq:retry:' .. job, 'arq:in-progress:' .. job, 'arq:result:' .. job)
end
local keys = redis.call('UNLINK', history, summary, folds, turns, context)
local listed = redis.call('ZREM', conversations, id) + redis.call('ZREM', pending, id)
return (keys + listed) > 0 and 1 or 0
