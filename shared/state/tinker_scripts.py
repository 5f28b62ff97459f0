"""Lua scripts of `tinker.py`, `tinker_sessions.py` and `tinker_requests.py`, executed atomically."""

# KEYS asked, model, open, tokens. ARGV: number, digest, MAX_WAITING, tokens, limit (empty: they are not counted). The
# number that all waiting commands wait for is always admitted, as far as the tokens allow.
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
if ARGV[5] ~= '' then
  if tonumber(redis.call('GET', KEYS[4]) or 0) >= tonumber(ARGV[5]) then return -2 end
  redis.call('INCRBY', KEYS[4], ARGV[4])
  redis.call('EXPIRE', KEYS[4], 120)
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

# KEYS checkpoints, expiring, checkpointed, stored. ARGV: KIND/NAME, stored text, new text (empty: none), path, expires
# or 0, tenant, bytes
CHANGE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[4])
  redis.call('HINCRBY', KEYS[4], ARGV[6], -ARGV[7])
end
if tonumber(ARGV[5]) > 0 then redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
else redis.call('ZREM', KEYS[2], ARGV[4]) end
return 1
"""

# KEYS draw, answer, waiting, drawing, tokens. ARGV: request, digest, now, seconds, MAX_WAITING_SAMPLES, tenant, job,
# minute, tokens of the prompt, tokens in all, limit (empty: they are not counted), 1 for one whose answer is forgotten
ASK_SAMPLE = """
local known, again = redis.call('HGET', KEYS[1], 'digest'), ARGV[12] == '1'
if known and known ~= ARGV[2] then return 0 end
if known and not again then return 1 end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', tonumber(ARGV[3]) - tonumber(ARGV[4]))
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[5]) then return -1 end
if ARGV[11] ~= '' and tonumber(redis.call('GET', KEYS[5]) or 0) >= tonumber(ARGV[11]) then return -2 end
if again and redis.call('DEL', KEYS[2]) == 0 then return 1 end
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'tenant', ARGV[6], 'job', ARGV[7])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[4], redis.call('ZCARD', KEYS[3]), ARGV[6])
for key = 1, 4 do if key ~= 2 then redis.call('EXPIRE', KEYS[key], ARGV[4]) end end
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[1], 'minute', ARGV[8], 'prompt', ARGV[9], 'reserved', ARGV[10])
  redis.call('INCRBY', KEYS[5], ARGV[10])
  redis.call('EXPIRE', KEYS[5], 120)
end
return 2
"""

# KEYS answer, waiting, drawing, tokens of the minute of the request, tokens of this minute. ARGV: answer, seconds,
# request, tenant, tokens more than were counted (empty: they stay)
ANSWER_SAMPLE = """
local kept = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
redis.call('ZREM', KEYS[2], ARGV[3])
local waiting = redis.call('ZCARD', KEYS[2])
if waiting > 0 then redis.call('ZADD', KEYS[3], waiting, ARGV[4]) else redis.call('ZREM', KEYS[3], ARGV[4]) end
if not kept then return 0 end
local more = tonumber(ARGV[5] ~= '' and ARGV[5] or '0')
if more > 0 then
  redis.call('INCRBY', KEYS[5], ARGV[5])
  redis.call('EXPIRE', KEYS[5], 120)
elseif more < 0 and redis.call('EXISTS', KEYS[4]) == 1 then redis.call('INCRBY', KEYS[4], ARGV[5]) end
return 1
"""

# KEYS checkpoints, checkpointed, expiring, stored. ARGV: KIND/NAME, record, seq, path, created, expires, tenant, bytes
ADD_CHECKPOINT = """
local known, bytes = redis.call('HGET', KEYS[1], ARGV[1]), tonumber(ARGV[8])
if known then
  local before = cjson.decode(known)
  if (tonumber(before.seq) or -1) > tonumber(ARGV[3]) then return 0 end
  bytes = bytes - (tonumber(before.size) or 0)
end
redis.call('HINCRBY', KEYS[4], ARGV[7], string.format('%.0f', bytes))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[4])
if tonumber(ARGV[6]) > 0 then redis.call('ZADD', KEYS[3], ARGV[6], ARGV[4]) end
return 1
"""

# KEYS sampler, in, model, sampling, samplers. ARGV: id, record, seq (empty: it is no newest one of a model), time, 1 if
# it holds weights of a model
ADD_SAMPLER = """
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[5], ARGV[4], ARGV[1])
if ARGV[3] ~= '' and tonumber(redis.call('HGET', KEYS[3], 'sampler_seq') or -1) <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], 'sampler', ARGV[1], 'sampler_seq', ARGV[3])
end
if ARGV[5] == '1' then redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1]) end
return 1
"""

# KEYS session, beat, beats, sessions. ARGV: id, record, created, now, BEAT_S, MAX_SESSIONS
OPEN_SESSION = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[6]) then return 0 end
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
end
redis.call('SET', KEYS[2], '1', 'EX', ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return 1
"""

# KEYS beats, session, beat, finished, sessions, trained. ARGV: id, time of a heartbeat that keeps it
CLOSE_SESSION = """
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0) > tonumber(ARGV[2]) then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[6])
return 1
"""

# KEYS model, models, models of the job, live, trained. ARGV: id, record, created, MAX_MODELS
ADD_MODEL = """
if redis.call('HEXISTS', KEYS[1], 'record') == 1 then return 1 end
if redis.call('SCARD', KEYS[4]) >= tonumber(ARGV[4]) then return -1 end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'used', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('SADD', KEYS[5], ARGV[1])
return 2
"""

# KEYS model. Returns the number of the command that unloads the model: the one after those it has had
UNLOAD = """
redis.call('HSETNX', KEYS[1], 'unload', redis.call('HGET', KEYS[1], 'next') or '0')
return redis.call('HGET', KEYS[1], 'unload')
"""
