-- audit_job: whether a fold job is one that its conversation waits for. Writes nothing.
--
-- KEYS   1 history   2 summary
-- ARGV   1 id   2 generation   3 count the job starts from
-- RETURNS 1 it is, or there is no such job any more | 0 there is no such conversation | -1 the conversation has moved on
local history, summary = KEYS[1], KEYS[2]
local id, generation, from = ARGV[1], ARGV[2], ARGV[3]

if redis.call('EXISTS', 'arq:job:' .. job_of(id, generation, from)) == 0 then return 1 end
if redis.call('EXISTS', history, summary) == 0 then return 0 end
-- What is damaged says nothing about its jobs.
if wrong_type(summary, 'hash') then return 1 end
local state = redis.call('HMGET', summary, 'generation', 'summarized_message_count')
if not state[1] or not state[2] then return 1 end
return (state[1] == generation and state[2] == from) and 1 or -1
