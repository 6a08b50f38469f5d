-- repair_job: remove a fold job that no conversation waits for, unless it is running.
--
-- KEYS   1 history   2 summary   3 queue
-- ARGV   1 id   2 generation   3 count the job starts from
-- RETURNS 1 removed | 0 it is wanted, running or gone
local history, summary, queue = KEYS[1], KEYS[2], KEYS[3]
local id, generation, from = ARGV[1], ARGV[2], ARGV[3]

local job = job_of(id, generation, from)
if wrong_type(queue, 'zset') or redis.call('EXISTS', 'arq:in-progress:' .. job) == 1 then return 0 end
if redis.call('EXISTS', history, summary) > 0 then
  if wrong_type(summary, 'hash') then return 0 end
  local state = redis.call('HMGET', summary, 'generation', 'summarized_message_count')
  if not state[1] or not state[2] or (state[1] == generation and state[2] == from) then return 0 end
end
redis.call('ZREM', queue, job)
return redis.call('DEL', 'arq:job:' .. job, 'arq:retry:' .. job) > 0 and 1 or 0
