"""The ledger of a job's groups: every accepted group is pending, trained or discarded.

A group's life, one entry per group in `adm:{job}:groups`, changed only by the script of `admission.py`. A job with
several policies has `adm:{job}~{policy}` and `adm:{job}~{policy}:groups` for each of them:
    issue -> r --accept--> p --train--> t:<batch>      batch = number of the step it was consumed for (1, 2, ...)
             |             '--discard-> d:<batch>:<reason>
             '--fail--> (removed, counted)
`restore(step)` turns t and d entries above a checkpointed step back into p; `commit(batch)` deletes those up to a batch
that can no longer be rolled back: that of the checkpoint before the one from which the trainer would resume, which may
be damaged.

Ledger, always: accepted = trained + discarded + pending.
"""

from __future__ import annotations

import msgspec

from opentinker.shared.types.core import WeightVersion


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of groups. `balanced` must hold at every moment."""

    issued: int
    running: int
    accepted: int
    trained: int
    pending: int
    discarded: dict[str, int]
    failed: dict[str, int]
    version: WeightVersion

    @property
    def balanced(self) -> bool:
        return self.accepted == self.trained + self.pending + sum(self.discarded.values())


ENTRIES = """
local function restore()
  -- step, max_staleness, groups_per_batch, total, discarded by reason (JSON), next_seq, position (-1: none), trained,
  -- gate, turn (in steps), groups that count as discarded already...
  local step, groups_per_batch, position = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[10])
  local trained = tonumber(ARGV[11])
  local pending, running, discarded, undone = 0, 0, 0, {}
  local entries, settled = redis.call('HGETALL', me.G), {}
  for i = 14, #ARGV do settled[ARGV[i]] = true end
  for i = 1, #entries, 2 do
    local seq, state = entries[i], entries[i + 1]
    local open = tag_of(state) > step or state == 'p' or state == 'r'
    local reason = tag_of(state) > step and string.match(state, '^d:%d+:(.*)')
    if reason then undone[reason] = (undone[reason] or 0) + 1 end
    if open and settled[seq] then redis.call('HSET', me.G, seq, 'd:' .. step .. ':rewound')
    elseif position >= 0 and open then redis.call('HDEL', me.G, seq)
    elseif tag_of(state) > step then redis.call('HSET', me.G, seq, 'p'); pending = pending + 1
    elseif state == 'p' then pending = pending + 1
    elseif state == 'r' then running = running + 1 end
  end
  local counts = cjson.decode(ARGV[8])
  -- A policy that was over discarded after its last checkpoint what nobody will ask for again.
  local ended = num(me, 'over') == 1 and num(me, 'trained') == trained
  for _, field in ipairs(redis.call('HKEYS', me.A)) do
    if string.sub(field, 1, 8) == 'discard:' then
      local reason = string.sub(field, 9)
      local kept = num(me, field) - (undone[reason] or 0)
      -- A resting policy discards for good, also after its checkpoint.
      if ended then counts[reason] = kept
      elseif reason == 'resting' then counts[reason] = math.max(counts[reason] or 0, kept) end
      redis.call('HDEL', me.A, field)
    end
  end
  for reason, count in pairs(counts) do
    redis.call('HSET', me.A, 'discard:' .. reason, count); discarded = discarded + count
  end
  local next = math.max(next_of_all(), tonumber(ARGV[9]))
  local served = step
  if position >= 0 then served = step - 1 end  -- nothing starts before these very weights are served
  redis.call('HDEL', me.A, 'over')
  redis.call('HSET', me.A, 'epoch', epoch, 'step', served, 'eta', ARGV[5], 'batch', groups_per_batch, 'total', ARGV[7],
             'trained', trained, 'extra', trained - step * groups_per_batch, 'pending', pending, 'running', running,
             'accepted', trained + discarded + pending, 'next', next,
             'shift', position >= 0 and next - position or 0, 'gate', ARGV[12], 'turn', ARGV[13])
  return {'ok'}
end

local function finish()
  -- accept: seq; fail: seq, reason. The answer has a state and counts per policy
  local answer, unchanged = {'ok'}, UNCHANGED
  for _, p in ipairs(policies) do
    local state = redis.call('HGET', p.G, ARGV[4])
    if not state then state = 'unknown'
    elseif state == 'r' then
      unchanged, state = nil, 'ok'
      add(p, 'running', -1)
      if op == 'fail' then
        redis.call('HDEL', p.G, ARGV[4]); add(p, 'failed', 1); add(p, 'fail:' .. ARGV[5], 1)
      else
        redis.call('HSET', p.G, ARGV[4], 'p'); add(p, 'pending', 1); add(p, 'accepted', 1)
      end
    else state = string.sub(state, 1, 1) end
    answer[#answer + 1] = state; answer[#answer + 1] = num(p, 'failed'); answer[#answer + 1] = num(p, 'accepted')
  end
  return answer, unchanged
end

local function consume()
  -- batch number, reason ('' for train), seqs...
  local done = 0
  local becomes = 'd:' .. ARGV[4] .. ':' .. ARGV[5]
  if op == 'train' then becomes = 't:' .. ARGV[4] end
  for i = 6, #ARGV do
    if redis.call('HGET', me.G, ARGV[i]) == 'p' then
      done = done + 1
      redis.call('HSET', me.G, ARGV[i], becomes)
    end
  end
  if done == 0 then return {'ok', 0}, UNCHANGED end
  add(me, 'pending', -done)
  if op == 'train' then
    add(me, 'trained', done)
    if done > num(me, 'batch') then add(me, 'extra', done - num(me, 'batch')) end
  else add(me, 'discard:' .. ARGV[5], done) end
  return {'ok', done}
end

local function over()
  -- reason. The policy has made its last step: what is pending is of no use to it, what runs is the others'
  local entries, pending, running = redis.call('HGETALL', me.G), 0, 0
  for i = 1, #entries, 2 do
    if entries[i + 1] == 'p' then pending = pending + 1
    elseif entries[i + 1] == 'r' then running = running + 1 end
    if entries[i + 1] == 'p' or entries[i + 1] == 'r' then redis.call('HDEL', me.G, entries[i]) end
  end
  redis.call('HSET', me.A, 'over', 1)
  if pending > 0 then add(me, 'pending', -pending); add(me, 'discard:' .. ARGV[4], pending) end
  if running > 0 then add(me, 'running', -running) end
  return {'ok', pending}
end

local function commit()
  -- batch number
  local entries = redis.call('HGETALL', me.G)
  for i = 1, #entries, 2 do
    local tag = tag_of(entries[i + 1])
    if tag >= 0 and tag <= tonumber(ARGV[4]) then redis.call('HDEL', me.G, entries[i]) end
  end
  return {'ok'}
end

local function clear()
  -- 'total' says how many groups the job may start
  for _, p in ipairs(policies) do redis.call('DEL', p.G); redis.call('HDEL', p.A, 'total') end
  return {'ok'}
end

local function pools() redis.call('HSET', me.A, 'pools', ARGV[4]); return {'ok'} end

local function set_version() redis.call('HSET', me.A, 'step', ARGV[4]); return {'ok'} end
"""
"""Lua, part of the script of `admission.py`: the operations on the entries of groups that exist."""
