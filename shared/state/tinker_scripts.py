"""Lua scripts of `tinker.py`, executed atomically."""

# KEYS asked, model, open. ARGV: number, digest, MAX_WAITING. The number that all waiting commands wait for is always
# admitted.
ASK = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known == ARGV[2] then return 1 end
if known then return 0 end
local number, missing = tonumber(ARGV[1]), tonumber(redis.call('HGET', KEYS[2], 'next') or 0)
local waiting = redis.call('ZCARD', KEYS[3])
if waiting >= tonumber(ARGV[3]) then
  local lowest = tonumber(redis.call('ZRANGE', KEYS[3], 0, 0)[1])
  if number ~= missing or lowest < missing then return -1 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[1], ARGV[1])
if number == missing then
  repeat missing = missing + 1 until redis.call('HEXISTS', KEYS[1], string.format('%.0f', missing)) == 0
  redis.call('HSET', KEYS[2], 'next', string.format('%.0f', missing))
end
return 2
"""

# KEYS answer, open. ARGV: answer, seconds, number
ANSWER = """
local kept = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
redis.call('ZREM', KEYS[2], ARGV[3])
return kept and 1 or 0
"""

# KEYS checkpoints, expiring, checkpointed. ARGV: KIND/NAME, stored text, new text (empty: none), path, expires or 0
CHANGE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else redis.call('HDEL', KEYS[1], ARGV[1]) redis.call('ZREM', KEYS[3], ARGV[4]) end
if tonumber(ARGV[5]) > 0 then redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
else redis.call('ZREM', KEYS[2], ARGV[4]) end
return 1
"""

# KEYS tokens. ARGV: tokens, limit
TAKE = """
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[2]) then return 0 end
redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], 120)
return 1
"""

# KEYS checkpoints, checkpointed, expiring. ARGV: KIND/NAME, record, seq, path, created, expires
ADD_CHECKPOINT = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and (tonumber(cjson.decode(known).seq) or -1) > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[4])
if tonumber(ARGV[6]) > 0 then redis.call('ZADD', KEYS[3], ARGV[6], ARGV[4]) end
return 1
"""

# KEYS sampler, in, model, sampling. ARGV: id, record, seq (empty: it is no newest one of a model), time (empty: it
# holds no weights of a model)
ADD_SAMPLER = """
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
if ARGV[3] ~= '' and tonumber(redis.call('HGET', KEYS[3], 'sampler_seq') or -1) <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], 'sampler', ARGV[1], 'sampler_seq', ARGV[3])
end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1]) end
return 1
"""
