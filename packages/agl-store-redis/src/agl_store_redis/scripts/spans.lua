-- Reads a part of an attempt's spans, behind a sequence.
-- KEYS[1]: the beginning of all keys. ARGV: rollout id; number of the attempt, or '' for the deciding or running one;
-- sequence; most spans; most bytes.
-- Returns nothing for an unknown rollout; else the attempt's number, 1 if the attempt is known, 1 if spans are left,
-- and the spans.
local base, id, number, after = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local left, bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local rollout = base .. 'r/' .. id
local progress = redis.call('HGET', rollout, 'p')
if not progress then return false end
if number == '' then number = string.format('%d', cmsgpack.unpack(progress)[6]) end
local is_known = number == '0' and 1 or redis.call('HEXISTS', rollout, number)

local list = base .. 's/' .. id .. '/' .. number
local size = redis.call('LLEN', list)
local function sequence(index) return (struct.unpack('>I4', redis.call('LINDEX', list, index))) end
local low, high = 0, math.min(size, after)  -- the first span is at least 1, and each is above the one before
if size == 0 or sequence(-1) <= after then low, high = size, size end
if size > 0 and high > 0 and low < size and sequence(high - 1) == high then low = high end  -- no gap before it
while low < high do
  local middle = math.floor((low + high) / 2)
  if sequence(middle) <= after then low = middle + 1 else high = middle end
end

local found = {}
while left > 0 and low < size and bytes > 0 do
  for _, span in ipairs(redis.call('LRANGE', list, low, low + math.min(left, 16) - 1)) do
    found[#found + 1] = span
    bytes = bytes - #span
  end
  low, left = low + 16, left - 16
end
return {number, is_known, (low < size and left > 0) and 1 or 0, found}
