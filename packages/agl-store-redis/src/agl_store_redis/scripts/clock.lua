-- Reads the server's time in two parts, and the next deadline or ''.
-- KEYS[1]: the beginning of all keys.
local clock = redis.call('TIME')
return {clock[1], clock[2], redis.call('ZRANGE', KEYS[1] .. 'due', 0, 0, 'WITHSCORES')[2] or ''}
