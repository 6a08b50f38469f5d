-- Shared by every script: it is put in front of each before it is loaded.
-- Reading comes first everywhere: a runtime error after the first write would not undo it.

-- arq's clock is the worker's own. A job scored with the time of Redis would wait for as long as that worker's clock
-- is behind, so jobs are scored an hour early; among themselves they keep their order.
local CLOCK_ALLOWANCE_MS = 3600000
-- How long arq keeps a job nobody starts; the outbox outlives it.
local JOB_EXPIRES_MS = 86400000

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function digits(number)
  return string.format('%.0f', number)
end

local function damaged(key, problem)
  return redis.error_reply('DAMAGED ' .. key .. ' ' .. problem)
end

-- The error if a key exists and is not of this kind.
local function wrong_type(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    return damaged(key, 'is a ' .. found .. ', not a ' .. kind)
  end
end

-- The number a field holds, if it is one that can be counted on; nil for anything else.
local function whole_number(text)
  return #text <= 15 and string.find(text, '^%d+$') and tonumber(text) or nil
end

-- What is added to, and what is counted from: a script that met another value half-way would leave half a turn.
local NUMBERS = {'message_count', 'summarized_message_count', 'version', 'expires_at', 'answer_input_tokens',
  'answer_output_tokens', 'fold_input_tokens', 'fold_output_tokens', 'fold_conflicts', 'fold_failures',
  'fold_rejections', 'seen_summarized_message_count', 'seen_fold_tokens'}

-- The state of a conversation as {generation, message_count, summarized_message_count, version, expires_at, numbers}, the
-- last holding every one of NUMBERS by its name, 0 where there is none;
-- nil if there is none; nil and an error if what is stored contradicts itself.
local function read_state(history, summary)
  local problem = wrong_type(history, 'list') or wrong_type(summary, 'hash')
  if problem then return nil, problem end
  local length = redis.call('LLEN', history)
  local generation = redis.call('HGET', summary, 'generation')
  if not generation then
    if length > 0 or redis.call('EXISTS', summary) == 1 then
      return nil, damaged(summary, 'has no generation, although ' .. history .. ' holds ' .. length .. ' messages')
    end
    return nil, nil
  end
  local found = redis.call('HMGET', summary, unpack(NUMBERS))
  local numbers = {}
  for i, name in ipairs(NUMBERS) do
    local number = found[i] and whole_number(found[i])
    if (found[i] and not number) or (i <= 3 and not number) then
      return nil, damaged(summary, 'has no number in ' .. name)
    end
    found[i] = number
    numbers[name] = number or 0
  end
  local count, folded, version, expires_at = found[1], found[2], found[3], found[4]
  if count ~= length then
    return nil, damaged(history, 'holds ' .. length .. ' messages where ' .. summary .. ' says ' .. count)
  end
  if folded > count or count % 2 == 1 or folded % 2 == 1 then
    return nil, damaged(summary, 'says that ' .. folded .. ' of ' .. count .. ' messages are summarized')
  end
  return {
    generation = generation, message_count = count, summarized_message_count = folded, version = version,
    expires_at = expires_at and digits(expires_at), numbers = numbers
  }
end

-- A generation is `<life>.<n>`. The life is the history's; n counts how often only the summary began anew, so that folds
-- of before cannot commit while turns of before can still be stored.
local function life_of(generation) return string.match(generation, '^[^.]*') end

local function next_generation(generation)
  local number = tonumber(string.match(generation, '%.(%d+)$')) or 0
  return life_of(generation) .. '.' .. (number + 1)
end

-- Messages in the window: it grows up to `most` before turns leave it, all at once, down to `window`.
local function held(unsummarized, window, most)
  return unsummarized <= most and math.max(window, unsummarized) or window
end

local function job_of(id, generation, folded)
  return 'fold:' .. id .. ':' .. generation .. ':' .. folded
end

-- To be called before the first write by whoever writes arq's keys later: they are not among KEYS, so that an ACL without
-- them would stop the script only there, half-way.
local function reach(job)
  local key = 'arq:job:' .. job
  redis.call('EXISTS', key)
  -- Since version 7 there are users who may read a key and not write it, and only there it can be asked for.
  if redis.acl_check_cmd and not (redis.acl_check_cmd('PSETEX', key, 1, '') and redis.acl_check_cmd('DEL', key)) then
    error({err = 'NOPERM the keys arq:* may not be written'})
  end
end

-- Write arq's own two keys for a fold job, unless the job is there already. True if it was written.
local function enqueue(queue, id, generation, folded)
  local job = job_of(id, generation, folded)
  if redis.call('EXISTS', 'arq:job:' .. job, 'arq:result:' .. job) > 0 then return false end
  local now = now_ms()
  local payload = '{"t":null,"f":"fold","a":["' .. id .. '","' .. generation .. '",' .. folded .. '],"k":{},"et":'
    .. digits(now) .. '}'
  redis.call('PSETEX', 'arq:job:' .. job, JOB_EXPIRES_MS, payload)
  redis.call('ZADD', queue, digits(now - CLOCK_ALLOWANCE_MS), job)
  return true
end

local FOLDS_REMEMBERED = 8

-- What became of a fold that this conversation was told of before: '1' committed, '0' not; nil if it is new. More than the
-- last one is remembered, because another fold may come between a lost reply and its repetition.
local function known_fold(summary, fold_id)
  local recent = ' ' .. (redis.call('HGET', summary, 'recent_folds') or '')
  local _, found = string.find(recent, ' ' .. fold_id .. '=', 1, true)
  return found and string.sub(recent, found + 1, found + 1)
end

local function remember_fold(summary, fold_id, result)
  local recent = {fold_id .. '=' .. result}
  for fold in string.gmatch(redis.call('HGET', summary, 'recent_folds') or '', '%S+') do
    if #recent < FOLDS_REMEMBERED then recent[#recent + 1] = fold end
  end
  redis.call('HSET', summary, 'recent_folds', table.concat(recent, ' '))
end

local EVENTS_KEPT = 256

-- Say on a channel of what kind it was. A hint is worth no turn: a user whose ACL has no channels goes on without them.
local function hint(channel, kind) redis.pcall('PUBLISH', channel, kind) end

-- Tell what happened: a bounded stream that can be read again from any point, and a hint on the channel of its name.
local function tell(events, event)
  redis.call('XADD', events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'event', event)
  hint(events, string.match(event, '^{"type":"(%a+)"'))
end

