-- Reads documents in order of their keys, at most as many as asked for.
-- KEYS[1]: the beginning of all keys. ARGV: the first key, with [ or ( before it; the key before which to stop, with (
-- before it; the limit.
local keys = redis.call('ZRANGEBYLEX', KEYS[1] .. 'k', ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
local found = {}
for at, each in ipairs(keys) do
  found[2 * at - 1], found[2 * at] = each, redis.call('HGET', KEYS[1] .. 'd', each)
end
return found
