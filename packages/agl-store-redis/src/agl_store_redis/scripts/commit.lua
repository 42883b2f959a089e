-- Ends a transaction: compares what it read with what is there now, and writes all of its changes or none.
-- KEYS[1]: the beginning of all keys.
-- ARGV: the writer's id and the number of its transaction; the count of comparisons, each with a kind, two names and
-- the expected value; then commands, each with its count of arguments; at the end the message to those who wait.
-- Returns 1 when the changes are written, also by an earlier call with the same number, and 0 when something was
-- changed by others.
local base, at = KEYS[1], 3
local function key(name) return base .. name end
local mark = key('w/' .. ARGV[1])
if tonumber(redis.call('GET', mark) or 0) >= tonumber(ARGV[2]) then return 1 end

local function is_same(kind, name, field, expected)
  if kind == 'p' then return (redis.call('HGET', key('r/' .. name), 'p') or '') == expected end
  if kind == 's' then return redis.call('LLEN', key('s/' .. name)) == tonumber(expected) end
  if kind == 'c' then return redis.call('ZCARD', key('c/' .. name)) == tonumber(expected) end
  if kind == 'v' then return redis.call('HEXISTS', key('v/' .. name), field) == tonumber(expected) end
  local document = redis.call('HGET', kind == 'a' and key('r/' .. name) or key('d'), kind == 'a' and field or name)
  return (document and redis.sha1hex(document) or '') == expected
end
local comparisons = tonumber(ARGV[at])
at = at + 1
for _ = 1, comparisons do
  if not is_same(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]) then return 0 end
  at = at + 4
end

local own = {}
function own.ADD(...)  -- numbers new rollouts: id, experiment, and 1 if it is queued
  local given = {...}
  local number = redis.call('HINCRBY', key('meta'), 'seq', #given / 3) - #given / 3
  for first = 1, #given, 3 do
    local id, experiment = given[first], given[first + 1]
    number = number + 1
    redis.call('HSET', key('r/' .. id), 'n', number, 'e', experiment)
    if given[first + 2] == '1' then
      redis.call('ZADD', key('q'), number, id)
      redis.call('ZADD', key('q/' .. experiment), number, id)
    end
  end
end
function own.FEED(...)  -- appends changes: the rollout's id, and the change
  local given = {...}
  local last = redis.call('HINCRBY', key('meta'), 'cursor', #given / 2) - #given / 2
  for first = 1, #given, 2 do
    last = last + 1
    local cursor = string.format('%.0f', last)
    redis.call('XADD', key('feed'), cursor .. '-0', 'c', given[first + 1])
    if given[first] ~= '' then redis.call('RPUSH', key('f/' .. given[first]), cursor) end
  end
end
function own.FORGET(id)  -- removes the changes of a rollout from the feed
  local cursors = redis.call('LRANGE', key('f/' .. id), 0, -1)
  for _, cursor in ipairs(cursors) do redis.call('XDEL', key('feed'), cursor .. '-0') end
  redis.call('UNLINK', key('f/' .. id))
end
function own.COUNT(...)  -- adds shares to statistics: experiment, key, and ten numbers, the last three of rewards
  local given = {...}
  for first = 1, #given, 12 do
    local name = key('st/' .. given[first])
    local new, old = {}, cmsgpack.unpack(redis.call('HGET', name, given[first + 1]) or '\154' .. ('\0'):rep(10))
    for at = 1, 10 do new[at] = tonumber(given[first + 1 + at]) end
    local count, apart = old[8] + new[8], new[9] - old[9]
    local rollouts = 0
    for at = 1, 3 do rollouts = rollouts + old[at] + new[at] end
    local squares = count == 0 and 0 or old[10] + new[10] + apart * apart * old[8] * new[8] / count
    local sums = {}
    for at = 1, 7 do sums[at] = old[at] + new[at] end
    sums[8], sums[9], sums[10] = count, count == 0 and 0 or old[9] + apart * new[8] / count, math.max(0, squares)
    if rollouts == 0 then
      redis.call('HDEL', name, given[first + 1])
      if redis.call('EXISTS', name) == 0 then redis.call('SREM', key('stn'), given[first]) end
    else
      redis.call('HSET', name, given[first + 1], cmsgpack.pack(sums))
      redis.call('SADD', key('stn'), given[first])
    end
  end
end
function own.PRUNE(...)  -- forgets lists that are empty
  for _, name in ipairs({...}) do
    if redis.call('EXISTS', key('by/rollout_id/' .. name)) == 0 then redis.call('SREM', key('lists'), name) end
  end
end

while at < #ARGV do
  local count = tonumber(ARGV[at])
  local command, name = ARGV[at + 1], ARGV[at + 2]
  if own[command] then
    own[command](unpack(ARGV, at + 2, at + count))
  else
    redis.call(command, key(name), unpack(ARGV, at + 3, at + count))
  end
  at = at + count + 1
end
redis.call('SET', mark, ARGV[2], 'EX', 86400)
if ARGV[#ARGV] ~= '' then redis.call('PUBLISH', key('changes'), ARGV[#ARGV]) end
return 1
