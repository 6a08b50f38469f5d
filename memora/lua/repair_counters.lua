-- repair_counters: put into the summary hash what its lists say, if nothing has changed since they were read.
--
-- KEYS   1 history   2 summary   3 folds
-- ARGV   1 generation   2 length of the history   3 length of the folds   4... fields, each with the value that was found
--        ('' for none) and the right one
-- RETURNS 1 repaired | 0 it has changed meanwhile
local history, summary, folds = KEYS[1], KEYS[2], KEYS[3]
local generation, messages, entries = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if wrong_type(history, 'list') or wrong_type(summary, 'hash') or wrong_type(folds, 'list') then return 0 end
if redis.call('HGET', summary, 'generation') ~= generation or redis.call('LLEN', history) ~= messages
  or redis.call('LLEN', folds) ~= entries then
  return 0
end
for i = 4, #ARGV, 3 do
  if (redis.call('HGET', summary, ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
for i = 4, #ARGV, 3 do redis.call('HSET', summary, ARGV[i], ARGV[i + 2]) end
return 1
