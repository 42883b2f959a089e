-- Reads versions of resources.
-- KEYS[1]: the beginning of all keys. ARGV: 'all' and a name for its versions, the oldest first; 'newest' and a name
-- for its newest; 'newest' alone for the newest of each name.
local base, found = KEYS[1], {}
local function read(name, versions)
  for _, version in ipairs(versions) do found[#found + 1] = redis.call('HGET', base .. 'v/' .. name, version) end
end
if ARGV[1] == 'all' then
  read(ARGV[2], redis.call('LRANGE', base .. 'o/' .. ARGV[2], 0, -1))
  return found
end
for _, name in ipairs(ARGV[2] and {ARGV[2]} or redis.call('ZRANGE', base .. 'names', 0, -1)) do
  read(name, redis.call('LRANGE', base .. 'o/' .. name, -1, -1))
end
return found
