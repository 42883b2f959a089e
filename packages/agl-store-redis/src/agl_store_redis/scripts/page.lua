-- Reads one page of rollouts from sorted lists, merged.
-- KEYS[1]: the beginning of all keys. ARGV[1]: the request, msgpack: names of lists; or none, and modes and statuses
-- of all experiments' lists of a field; after_id with after_value, limit, is_newest_first.
-- Returns each rollout's id and hash.
local base, request = KEYS[1], cmsgpack.unpack(ARGV[1])
local function key(name) return base .. name end
local step = request.is_newest_first and -1 or 1

local names = request.lists
if #names == 0 then
  for _, name in ipairs(redis.call('SMEMBERS', key('lists'))) do
    local mode, status = name:match('/([^/]*)/([^/]*)$')
    if request.modes[mode] and request.statuses[status] then
      names[#names + 1] = (request.statuses[status] .. '/') .. name
    end
  end
end

-- Compares bytes, because Lua's < follows the server's locale.
local function is_less(score_a, id_a, score_b, id_b)
  if score_a ~= score_b then return score_a < score_b end
  for at = 1, math.min(#id_a, #id_b) do
    local a, b = id_a:byte(at), id_b:byte(at)
    if a ~= b then return a < b end
  end
  return #id_a < #id_b
end

local function entry(list, rank)
  local found = redis.call('ZRANGE', list, rank, rank, 'WITHSCORES')
  return tonumber(found[2]), found[1]
end

-- The rank of the first entry behind the page before, in the direction of the page.
local function start(list, size)
  local after_id, after_score = request.after_id, request.after_value
  if after_id == '' then return step > 0 and 0 or size - 1 end
  local low, high = 0, size
  while low < high do
    local middle = math.floor((low + high) / 2)
    local score, id = entry(list, middle)
    local is_before
    if step > 0 then
      is_before = not is_less(after_score, after_id, score, id)
    else
      is_before = is_less(score, id, after_score, after_id)
    end
    if is_before then low = middle + 1 else high = middle end
  end
  return step > 0 and low or low - 1
end

local part = math.min(math.max(16, math.ceil(request.limit / math.max(1, #names))), 1000)
local function fill(head)  -- reads the next part of a list
  local first, last = head.rank, head.rank + step * (part - 1)
  if step < 0 then first, last = math.max(0, last), head.rank end
  if head.rank < 0 or head.rank >= head.size then return false end
  head.entries = redis.call('ZRANGE', head.list, first, last, 'WITHSCORES')
  head.rank = head.rank + step * part
  head.at = step > 0 and 1 or #head.entries - 1
  return #head.entries > 0
end
local function read(head)
  head.id, head.score = head.entries[head.at], tonumber(head.entries[head.at + 1])
end
local function advance(head)
  head.at = head.at + 2 * step
  if (head.at < 1 or head.at > #head.entries) and not fill(head) then return false end
  read(head)
  return true
end

local function comes_first(a, b)
  if step > 0 then return is_less(a.score, a.id, b.score, b.id) end
  return is_less(b.score, b.id, a.score, a.id)
end
local heap = {}
local function sink(at)
  while true do
    local least = at
    for child = 2 * at, math.min(2 * at + 1, #heap) do
      if comes_first(heap[child], heap[least]) then least = child end
    end
    if least == at then return end
    heap[at], heap[least] = heap[least], heap[at]
    at = least
  end
end
for _, name in ipairs(names) do
  local list = key(name)
  local head = {list = list, size = redis.call('ZCARD', list)}
  head.rank = start(list, head.size)
  if fill(head) then
    read(head)
    heap[#heap + 1] = head
  end
end
for at = math.floor(#heap / 2), 1, -1 do sink(at) end

local found = {}
while #heap > 0 and #found < request.limit do
  local row = redis.call('HGETALL', key('r/' .. heap[1].id))
  if #row > 0 then found[#found + 1] = {heap[1].id, row} end  -- a damaged rollout was removed, but not from its group
  if not advance(heap[1]) then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  sink(1)
end
return found
