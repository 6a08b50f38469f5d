-- settle_fold: a fold found nothing pending. Take the conversation out of the outbox, unless it has changed since.
--
-- KEYS   1 history   2 summary   3 pending
-- ARGV   1 id   2 generation seen ('' if there was no conversation)   3 message_count seen   4 count seen
-- RETURNS 1 if the outbox no longer lists it, 0 if it changed
local history, summary, pending = KEYS[1], KEYS[2], KEYS[3]
local id, generation, count, folded = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local state, problem = read_state(history, summary)
if problem then return problem end
if state and (state.generation ~= generation or state.message_count ~= count
  or state.summarized_message_count ~= folded) then
  return 0
end
redis.call('ZREM', pending, id)
return 1
