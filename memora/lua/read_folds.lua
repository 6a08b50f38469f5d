-- read_folds: one page of the audit trail, with the generation it belongs to. Writes nothing.
--
-- KEYS   1 history   2 summary   3 folds
-- ARGV   1 first index   2 index after the last
-- RETURNS {} if there is no such conversation, else {generation, version, {entries}}
local history, summary, folds = KEYS[1], KEYS[2], KEYS[3]
local state, problem = read_state(history, summary)
problem = problem or wrong_type(folds, 'list')
if problem then return problem end
if not state then return {} end
local first, stop = tonumber(ARGV[1]), tonumber(ARGV[2])
return {state.generation, state.version, stop > first and redis.call('LRANGE', folds, first, stop - 1) or {}}
