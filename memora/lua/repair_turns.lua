-- repair_turns: forget turn ids and a last context that name messages the history does not hold, so that a turn which is
-- not there can be sent again.
--
-- KEYS   1 history   2 summary   3 turns   4 context
-- RETURNS 1 repaired | 0 nothing to repair
local history, summary, turns, context = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local state = read_state(history, summary)
if not state or wrong_type(turns, 'zset') or wrong_type(context, 'string') then return 0 end
local forgotten = redis.call('ZREMRANGEBYSCORE', turns, '(' .. digits(state.message_count), '+inf')
local record = redis.call('GET', context)
local readable, sent = pcall(cjson.decode, record or '')
local position = readable and type(sent) == 'table' and tonumber(sent.position)
if position and position + 2 > state.message_count then forgotten = forgotten + redis.call('DEL', context) end
return forgotten > 0 and 1 or 0
