-- backlog: how far the folds are behind. Looks into a bounded number of the conversations that wait, those due longest
-- first; what cannot be read is passed over. Writes nothing.
--
-- KEYS   1 pending   2 queue
-- ARGV   1 most conversations to look into   2 key prefix up to the id
-- RETURNS {conversations that wait, jobs in the queue, messages that wait in the conversations looked into,
--          ms since the first of them left its window}
local pending, queue = KEYS[1], KEYS[2]
local most, prefix = tonumber(ARGV[1]), ARGV[2]

local problem = wrong_type(pending, 'zset') or wrong_type(queue, 'zset')
if problem then return problem end
local now, messages, longest = now_ms(), 0, 0
for _, id in ipairs(redis.call('ZRANGE', pending, 0, most - 1)) do
  local summary, history = prefix .. id .. ':summary', prefix .. id .. ':history'
  if not wrong_type(summary, 'hash') and not wrong_type(history, 'list') then
    local found = redis.call('HMGET', summary, 'message_count', 'summarized_message_count', 'window_messages')
    local count, folded, window = tonumber(found[1]), tonumber(found[2]), tonumber(found[3])
    if count and folded and window and count - window > folded then
      messages = messages + count - window - folded
      -- The message whose arrival pushed the oldest one that waits out of the window.
      local at = string.match(redis.call('LINDEX', history, folded + window) or '', '"at":(%d+)}$')
      if at then longest = math.max(longest, now - tonumber(at)) end
    end
  end
end
return {redis.call('ZCARD', pending), redis.call('ZCARD', queue), messages, digits(longest)}
