-- Begins a transaction: reads what its operations need, at one moment, and takes queued rollouts out of the queue.
-- KEYS[1]: the beginning of all keys. ARGV[1]: the request, msgpack. ARGV[2..]: keys of documents.
-- Returns the clock's two parts and the next deadline; and behind them, unless attempts are overdue and the request
-- does not ask for them: rollouts, attempts, counts of spans, span ids that are stored, queues, claims, versions,
-- documents.
local base, request = KEYS[1], cmsgpack.unpack(ARGV[1])
local function key(name) return base .. name end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local due = redis.call('ZRANGE', key('due'), 0, 0, 'WITHSCORES')
local answer = {clock[1], clock[2], due[2] or ''}
for _, member in ipairs(request.held) do  -- what an earlier try of this transaction took
  redis.call('ZADD', key('held'), 'XX', 0, member)
end
if due[2] and tonumber(due[2]) <= now and not request.lapsed then return answer end

local rollouts, known = {}, {}
local function load_rollout(id)
  if known[id] == nil then
    local row = redis.call('HMGET', key('r/' .. id), 'n', 'p', 'd', 'e')
    row.attempts = redis.call('HLEN', key('r/' .. id))  -- the other fields are attempts
    for at = 1, 4 do row.attempts = row.attempts - (row[at] and 1 or 0) end
    known[id] = row[1] and row or false
    rollouts[#rollouts + 1] = {id, row[1] or '', row[2] or '', row[3] or '', row[4] or '', row.attempts}
  end
  return known[id]
end

local attempts = {}
local function load_attempt(id, number)
  local found = load_rollout(id) and redis.call('HGET', key('r/' .. id), number)
  if found then attempts[#attempts + 1] = {id, number, found} end
  return found
end
local function load_named(attempt_id)
  local id, number = attempt_id:match('^(.*)%.(%d+)$')
  return id and load_attempt(id, number)
end

if request.lapsed then
  local time = string.format('%.6f', now)
  local overdue = redis.call('ZRANGEBYSCORE', key('due'), '-inf', time, 'LIMIT', 0, request.lapsed)
  for _, attempt_id in ipairs(overdue) do
    if not load_named(attempt_id) then redis.call('ZREM', key('due'), attempt_id) end  -- its rollout was removed
  end
end
for _, id in ipairs(request.rollouts) do
  local row = load_rollout(id)
  local is_read, progress = pcall(cmsgpack.unpack, row and row[2])
  local number = is_read and type(progress) == 'table' and tonumber(progress[6]) or row and row.attempts or 0
  if number > 0 then load_attempt(id, number) end
end
for _, each in ipairs(request.attempts) do load_attempt(each[1], each[2]) end

local counts, kept = {}, {}
for _, each in ipairs(request.spans) do
  local id, number, span_ids = each[1], each[2], each[3]
  load_rollout(id)
  if number > 0 then load_attempt(id, number) end
  local name = id .. '/' .. number
  local last = redis.call('LINDEX', key('s/' .. name), -1)
  counts[#counts + 1] = {id, number, redis.call('LLEN', key('s/' .. name)), last and struct.unpack('>I4', last) or 0}
  for first = 1, #span_ids, 1000 do
    local part = {unpack(span_ids, first, math.min(first + 999, #span_ids))}
    for at, found in ipairs(redis.call('HMGET', key('i/' .. name), unpack(part))) do
      if found then kept[#kept + 1] = {id, number, part[at]} end
    end
  end
end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', key('held'), '-inf', clock[1])) do  -- of transactions that died
  local experiment, id = member:match('^([^/]*)/(.*)$')
  local number = redis.call('HGET', key('r/' .. id), 'n')
  redis.call('ZREM', key('held'), member)
  if number then
    redis.call('ZADD', key('q'), number, id)
    redis.call('ZADD', key('q/' .. experiment), number, id)
  end
end
local queues = {}
for _, each in ipairs(request.queues) do
  local name = each[1] and 'q/' .. each[1] or 'q'
  local found = redis.call('ZRANGE', key(name), 0, each[2] - 1)
  local experiments = {}
  for at, id in ipairs(found) do
    load_rollout(id)
    experiments[at] = redis.call('HGET', key('r/' .. id), 'e')
    redis.call('ZREM', key('q'), id)
    redis.call('ZREM', key('q/' .. experiments[at]), id)
    redis.call('ZADD', key('held'), tonumber(clock[1]) + request.hold_s, experiments[at] .. '/' .. id)
  end
  queues[#queues + 1] = found
end

local claims = {}
for _, claim_id in ipairs(request.claims) do
  local members = redis.call('ZRANGE', key('c/' .. claim_id), 0, -1)
  claims[#claims + 1] = #members
  for _, attempt_id in ipairs(members) do load_named(attempt_id) end
end
local versions = {}
for _, each in ipairs(request.versions) do
  versions[#versions + 1] = redis.call('HGET', key('v/' .. each[1]), each[2])
end
local documents = {}
for at = 2, #ARGV do documents[at - 1] = redis.call('HGET', key('d'), ARGV[at]) end

for _, part in ipairs({rollouts, attempts, counts, kept, queues, claims, versions, documents}) do
  answer[#answer + 1] = part
end
return answer
