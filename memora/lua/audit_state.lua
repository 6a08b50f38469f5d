-- audit_state: everything about one conversation but the contents of its lists, in one step and exactly as it is stored,
-- damaged or not. Writes nothing.
--
-- KEYS   1 history   2 summary   3 folds   4 turns   5 context   6 lock   7 events   8 conversations   9 pending   10 queue
-- ARGV   1 id   2 most turn ids
-- RETURNS {now in ms, {type of each of the seven keys}, {when each expires in ms, -1 never, -2 no key; empty if Redis
--          cannot say}, {the summary hash}, length of the history, length of the folds, turn ids remembered,
--          {newest of them, each followed by its score}, context record, place in the index, time in the outbox,
--          1 if its fold job is in the queue or running}; what is not there or is of another type is nil or empty
local history, summary, folds, turns, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local conversations, pending, queue = KEYS[8], KEYS[9], KEYS[10]
local id, most_turns = ARGV[1], tonumber(ARGV[2])
local PARTS = 7

local types, expiries = {}, {}
for part = 1, PARTS do
  types[part] = redis.call('TYPE', KEYS[part]).ok
  local expiry = redis.pcall('PEXPIRETIME', KEYS[part])
  if type(expiry) == 'number' then expiries[part] = expiry end
end

local function length_of(list, part) return types[part] == 'list' and redis.call('LLEN', list) or 0 end

local function place_in(list)
  return not wrong_type(list, 'zset') and redis.call('ZSCORE', list, id)
end

local has_job = 0
local is_hash, has_turns = types[2] == 'hash', types[4] == 'zset'
local state = is_hash and redis.call('HMGET', summary, 'generation', 'summarized_message_count') or {}
if state[1] and state[2] then
  local job = job_of(id, state[1], state[2])
  local waits = not wrong_type(queue, 'zset') and redis.call('ZSCORE', queue, job)
  if waits or redis.call('EXISTS', 'arq:job:' .. job, 'arq:in-progress:' .. job) > 0 then has_job = 1 end
end
return {
  digits(now_ms()), types, expiries, is_hash and redis.call('HGETALL', summary) or {},
  length_of(history, 1), length_of(folds, 3), has_turns and redis.call('ZCARD', turns) or 0,
  has_turns and redis.call('ZRANGE', turns, -most_turns, -1, 'WITHSCORES') or {},
  types[5] == 'string' and redis.call('GET', context), place_in(conversations), place_in(pending), has_job
}
