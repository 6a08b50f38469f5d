-- repair_leftovers: remove what is left of a conversation of which neither history nor summary is there.
--
-- KEYS   1 history   2 summary   3... what may be left
-- RETURNS how many keys were removed
local history, summary = KEYS[1], KEYS[2]

if redis.call('EXISTS', history, summary) > 0 then return 0 end
return redis.call('UNLINK', unpack(KEYS, 3))
