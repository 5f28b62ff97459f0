"""Lua scripts that write requests of the Tinker API and their answers; `requests.py` says which keys there are."""

from __future__ import annotations

from opentinker.shared.state.tinker.held_bytes import HELD

# Tokens of later minutes that commands have had already.
_OWED = """
local function owed(key, limit, minute)
  local known = redis.call('HMGET', key, 'minute', 'tokens')
  if not known[1] then return 0 end
  return math.max(0, tonumber(known[2]) - limit * (tonumber(minute) - tonumber(known[1]) - 1))
end
"""

# The lowest number that no command has had goes up; digests of the numbers far below it are forgotten.
_ADVANCE = """
local function text(number) return string.format('%.0f', number) end
local function advance(missing, kept)
  repeat
    redis.call('HDEL', KEYS[1], text(missing - kept))
    missing = missing + 1
  until redis.call('HEXISTS', KEYS[1], text(missing)) == 0
  redis.call('HSET', KEYS[2], 'next', text(missing))
end
"""

# KEYS asked, model, open, tokens, reserved, owed, HELD_KEYS. ARGV: number, digest, MAX_WAITING, tokens, limit (empty:
# they are not counted), minute, MINUTES_CHARGED, request, bytes, tenant, MAX_HELD_BYTES, now, KEPT_DIGESTS. The
# number that all waiting commands wait for is always admitted, as far as the tokens allow. Tokens that samples may need
# do not delay commands.
ASK = (
    HELD
    + _OWED
    + _ADVANCE
    + """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known == ARGV[2] then return 1 end
if known then return 0 end
local number, missing = tonumber(ARGV[1]), tonumber(redis.call('HGET', KEYS[2], 'next') or 0)
if number < missing - ARGV[13] then return 1 end
local lowest, size = redis.call('ZRANGE', KEYS[3], 0, 0)[1], ARGV[9]
local is_awaited = lowest and number == missing and tonumber(lowest) >= missing
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[3]) and not is_awaited then return -1 end
if redis.call('HEXISTS', KEYS[2], 'over') == 1 then size = '0' end
if is_full(size, ARGV[10], ARGV[11], ARGV[12]) and not is_awaited then return -3 end
if ARGV[5] ~= '' then
  local limit = tonumber(ARGV[5])
  local used = tonumber(redis.call('GET', KEYS[4]) or 0) - tonumber(redis.call('GET', KEYS[5]) or 0)
  used = used + owed(KEYS[6], limit, ARGV[6])
  if used >= limit then return -2 end
  redis.call('INCRBY', KEYS[4], ARGV[4])
  redis.call('EXPIRE', KEYS[4], 120)
  local beyond = math.min(used + tonumber(ARGV[4]) - limit, limit * tonumber(ARGV[7]))
  if beyond > 0 then
    redis.call('HSET', KEYS[6], 'minute', ARGV[6], 'tokens', string.format('%.0f', beyond))
    redis.call('EXPIRE', KEYS[6], 60 * (tonumber(ARGV[7]) + 2))
  end
end
hold(ARGV[8], size, ARGV[10])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[1], ARGV[1])
if number == missing then advance(missing, ARGV[13]) end
return 2
"""
)

# KEYS asked, model, open. ARGV: number, KEPT_DIGESTS. A model that was removed stays removed.
LEAVE_OUT = (
    _ADVANCE
    + """
local missing, last = tonumber(redis.call('HGET', KEYS[2], 'next') or 0), tonumber(ARGV[1])
if missing > last or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local floor = last - ARGV[2]
for number = missing - ARGV[2], math.min(missing, floor) - 1 do redis.call('HDEL', KEYS[1], text(number)) end
for _, number in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if tonumber(number) < floor then redis.call('HDEL', KEYS[1], number) end
end
advance(last, ARGV[2])
return 1
"""
)

# KEYS answer, open, HELD_KEYS. ARGV: answer, seconds, number, request, bytes that count until it is read, when it
# expires
ANSWER = (
    HELD
    + """
local kept = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
redis.call('ZREM', KEYS[2], ARGV[3])
local tenant = release(ARGV[4])
if kept and tenant then hold(KEYS[1], ARGV[5], tenant, ARGV[6]) end
return kept and 1 or 0
"""
)

# KEYS draw, answer, waiting, tokens, reserved, owed, HELD_KEYS. ARGV: request, digest, now, seconds,
# MAX_WAITING_SAMPLES, tenant, job, minute, tokens of the prompt, tokens in all, limit (empty: they are not counted), 1
# for one whose answer is forgotten, UNSENT_S, bytes, MAX_HELD_BYTES, bytes that the answer may have. Returns a code,
# and how often the request was lost.
ASK_SAMPLE = (
    HELD
    + _OWED
    + """
local known, again = redis.call('HGET', KEYS[1], 'digest'), ARGV[12] == '1'
local lost = tonumber(redis.call('HGET', KEYS[1], 'lost') or 0)
if known and known ~= ARGV[2] then return {0, lost} end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', tonumber(ARGV[3]) - tonumber(ARGV[4]))
if known and not again then
  if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('ZSCORE', KEYS[3], ARGV[1]) then return {1, lost} end
end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[5]) then return {-1, lost} end
if is_full(ARGV[14] + ARGV[16], ARGV[6], ARGV[15], ARGV[3]) then return {-3, lost} end
if ARGV[11] ~= '' then
  local limit = tonumber(ARGV[11])
  if tonumber(redis.call('GET', KEYS[4]) or 0) + owed(KEYS[6], limit, ARGV[8]) >= limit then return {-2, lost} end
end
if again then
  if redis.call('DEL', KEYS[2]) == 0 then return {1, lost} end
  lost = redis.call('HINCRBY', KEYS[1], 'lost', 1)
end
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'tenant', ARGV[6], 'job', ARGV[7])
redis.call('ZADD', KEYS[3], tonumber(ARGV[3]) - tonumber(ARGV[4]) + tonumber(ARGV[13]), ARGV[1])
for name, bytes in pairs({[ARGV[1]] = ARGV[14], [KEYS[1]] = ARGV[16]}) do
  hold(name, bytes, ARGV[6], tonumber(ARGV[3]) + tonumber(ARGV[13]))
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[4])
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[1], 'minute', ARGV[8], 'prompt', ARGV[9], 'reserved', ARGV[10])
  for key = 4, 5 do
    redis.call('INCRBY', KEYS[key], ARGV[10])
    redis.call('EXPIRE', KEYS[key], 120)
  end
end
return {2, lost}
"""
)

# KEYS answer, draw, waiting, tokens and reserved of the minute of the request, tokens of this minute, HELD_KEYS. ARGV:
# answer, seconds, request, tokens reserved, tokens more than those (both empty: they stay), 1 if it waits no longer,
# bytes that count until it is read, tenant, when it expires
ANSWER_SAMPLE = (
    HELD
    + """
local kept = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
release(KEYS[2])
if ARGV[6] == '1' then
  redis.call('ZREM', KEYS[3], ARGV[3])
  release(ARGV[3])
end
if not kept then return 0 end
hold(KEYS[1], ARGV[7], ARGV[8], ARGV[9])
if ARGV[4] == '' then return 1 end
if redis.call('EXISTS', KEYS[5]) == 1 then redis.call('INCRBY', KEYS[5], -tonumber(ARGV[4])) end
local more = tonumber(ARGV[5])
if more > 0 then
  redis.call('INCRBY', KEYS[6], ARGV[5])
  redis.call('EXPIRE', KEYS[6], 120)
elseif more < 0 and redis.call('EXISTS', KEYS[4]) == 1 then redis.call('INCRBY', KEYS[4], ARGV[5]) end
return 1
"""
)
