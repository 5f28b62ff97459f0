"""Lua scripts that write records and events of jobs. `store.py` puts LED before PLACE, UPDATE and CREATE, and
MADE_BEFORE before CREATE."""

from __future__ import annotations

from opentinker.shared.state.lease_table import CHARGE

# A client that lost the connection sends its command again: `op` keys remember for a while what was done, so that a
# change is made, and an event logged, once.

# KEYS job, events, active, ending, op, states. ARGV: id, allowed states (comma separated, "" = any that is not final),
# new state, epoch (-1: the scheduler), now, fields, event
TRANSITION = """
local before = redis.call('GET', KEYS[5])
if before then return {'ok', before} end
local current = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'version')
if not current[1] then return {'missing'} end
local final = {succeeded=true, failed=true, cancelled=true}
local epoch = tonumber(ARGV[4])
if epoch >= 0 and epoch < tonumber(current[2]) then return {'fenced', current[2]} end
local allowed = false
if ARGV[2] == '' then allowed = not final[current[1]] end
for state in string.gmatch(ARGV[2], '[^,]+') do if state == current[1] then allowed = true end end
if not allowed then return {'conflict', current[1]} end
local version = tonumber(current[3]) + 1
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'updated', ARGV[5], 'version', version)
if epoch > tonumber(current[2]) then redis.call('HSET', KEYS[1], 'epoch', epoch) end
local fields = cjson.decode(ARGV[6])
for key, value in pairs(fields) do redis.call('HSET', KEYS[1], key, value) end
if final[ARGV[3]] then redis.call('SREM', KEYS[3], ARGV[1]); redis.call('SADD', KEYS[4], ARGV[1])
else redis.call('SADD', KEYS[3], ARGV[1]) end
local entry = redis.call('XADD', KEYS[2], 'MAXLEN', '~', '5000', '*', 'event', ARGV[7])
redis.call('XADD', KEYS[6], entry, 'event', ARGV[7], 'version', version)
redis.call('SET', KEYS[5], current[1], 'EX', 120)
return {'ok', current[1]}
"""

_LEASES = """
if led_by_another(ARGV[8]) then return {'led'} end
for i = 9, #ARGV, 3 do if taken(ARGV[i], ARGV[1]) then return {'taken', ARGV[i]} end end
for i = 9, #ARGV, 3 do grant(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
local version"""
# The same of the scheduler that leads. KEYS also leases, leases:held, leader:epoch. ARGV also the leader's epoch, then
# slot, lease and account of every worker that the job gets with its state.
PLACE = CHARGE + TRANSITION.replace("\nlocal version", _LEASES, 1)

# KEYS job, events, op, failures (optional). ARGV: epoch, now, fields (JSON object), event ('' = none),
# '1' = only if the job is not over, leader's epoch
UPDATE = """
if led_by_another(ARGV[6]) then return {'led'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ok'} end
local epoch, state = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'state'))
if not epoch then return {'missing'} end
if ARGV[5] == '1' and (state == 'succeeded' or state == 'failed' or state == 'cancelled') then
  return {'conflict', state}
end
if tonumber(ARGV[1]) >= 0 and tonumber(ARGV[1]) < tonumber(epoch) then return {'fenced', epoch} end
redis.call('HSET', KEYS[1], 'updated', ARGV[2])
for key, value in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', KEYS[1], key, value) end
if ARGV[4] ~= '' then
  local entry = redis.call('XADD', KEYS[2], 'MAXLEN', '~', '5000', '*', 'event', ARGV[4])
  if KEYS[4] then redis.call('XADD', KEYS[4], 'MAXLEN', '~', '1000', entry, 'event', ARGV[4]) end
  redis.call('SET', KEYS[3], 1, 'EX', 120)
end
return {'ok'}
"""

# KEYS job, events, jobs, active, idempotency, states, idempotency of sweeps. ARGV: id, now, fields, event, body hash,
# ttl seconds, leader's epoch
CREATE = """
if led_by_another(ARGV[7]) then return {'led'} end
if redis.call('EXISTS', KEYS[1]) == 1 then return {'ok', ARGV[1]} end
local made = made_before(KEYS[5], 'job', KEYS[7], 'sweep', ARGV[1], ARGV[5], ARGV[6])
if made then return made end
for key, value in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', KEYS[1], key, value) end
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
local entry = redis.call('XADD', KEYS[2], 'MAXLEN', '~', '5000', '*', 'event', ARGV[4])
redis.call('XADD', KEYS[6], entry, 'event', ARGV[4], 'version', 0)
return {'ok', ARGV[1]}
"""

# KEYS job. ARGV: now, fields to replace, tags to add, tags to remove, most tags. The last four are JSON.
LABEL = """
local tags = redis.call('HGET', KEYS[1], 'tags')
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing'} end
local removed, kept, there = {}, {}, {}
for _, tag in ipairs(cjson.decode(ARGV[4])) do removed[tag] = true end
for _, tag in ipairs(cjson.decode(tags or '[]')) do
  if not removed[tag] then table.insert(kept, tag); there[tag] = true end
end
local added = cjson.decode(ARGV[3])
for _, tag in ipairs(added) do
  if not there[tag] then table.insert(kept, tag); there[tag] = true end
end
if #kept > tonumber(ARGV[5]) and #added > 0 then return {'many', tostring(#kept)} end
redis.call('HSET', KEYS[1], 'updated', ARGV[1], 'tags', #kept > 0 and cjson.encode(kept) or '[]')
for key, value in pairs(cjson.decode(ARGV[2])) do redis.call('HSET', KEYS[1], key, value) end
return {'ok'}
"""
