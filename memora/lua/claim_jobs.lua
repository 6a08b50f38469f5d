-- claim_jobs: take fold jobs that are due and that no worker has, each by a lease. What takes arq four round trips for
-- each job, with a claim that lasts as long as the longest fold, is one here for all of them.
--
-- KEYS    1 queue
-- ARGV    1 most jobs to take   2 now in ms, by the clock of the worker, which arq's delays go by   3 lease in ms
--         4… ids of jobs, in the order in which they are wanted
-- RETURNS the id and the score of each job that was taken
local queue = KEYS[1]
local most, now, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local problem = wrong_type(queue, 'zset')
if problem then return problem end

local taken = {}
for i = 4, #ARGV do
  if #taken == 2 * most then break end
  local score = redis.call('ZSCORE', queue, ARGV[i])
  if score and tonumber(score) <= now and redis.call('SET', 'arq:in-progress:' .. ARGV[i], '1', 'NX', 'PX', lease_ms) then
    taken[#taken + 1] = ARGV[i]
    taken[#taken + 1] = digits(tonumber(score))
  end
end
return taken
