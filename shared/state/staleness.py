"""The staleness bound: how many groups may be under way.

The bound (AReaL, arXiv 2505.24298 eq. 3, counted in groups): a group may start only while
    trained + pending + running < (max_staleness + version + 1) * groups_per_batch
holds for the job's policy. In a job with several policies a group is one match, each policy counts it separately, and
the bound must hold for the policies that gate. Among those with steps left, the job's schedule
(`spec/matches/schedules.py`) lets these gate:
    all         each of them
    fastest     those whose served version stands for the most groups
    turn        the first of those that have had the fewest turns, a turn being a number of steps
    neediest    of those that serve the oldest version, the one with the most room
A policy that has trained all its groups no longer gates, even while its last weights are evaluated.
`trained` counts one batch per step here, also where a step took more (`extra`).
Failed and discarded groups leave the count (`group_ledger.py`) and so are replaced. A job never starts more than
steps * groups_per_batch, has at most MAX_OPEN groups running, and starts none unless it holds workers. In its turn a
policy starts no more than the turn needs.
"""

from __future__ import annotations

MAX_OPEN = 4096
"""Groups of one job that run or wait for a rollout worker, regardless of the staleness bound: each is a ticket in a
stream that all jobs share."""

ISSUE = """
local function room_of(p)
  local busy = num(p, 'trained') + num(p, 'pending') + num(p, 'running') - num(p, 'extra')
  local max_staleness, version = num(p, 'eta'), num(p, 'step')  -- names of the fields in Redis, kept for running jobs
  local most = math.min((max_staleness + version + 1) * num(p, 'batch'), num(p, 'total'))
  local turn = num(p, 'turn')
  if turn > 0 then most = math.min(most, (math.floor(version / turn) + 1) * turn * num(p, 'batch')) end
  return most - busy
end

local function highest(policies, rank)
  local found, most = {}, nil
  for _, p in ipairs(policies) do
    local own = rank(p)
    if most == nil or own > most then found, most = {p}, own
    elseif own == most then found[#found + 1] = p end
  end
  return found
end

local function gates(open)
  local gate, unfinished = redis.call('HGET', me.A, 'gate'), {}
  for _, p in ipairs(open) do
    if num(p, 'trained') - num(p, 'extra') < num(p, 'total') then unfinished[#unfinished + 1] = p end
  end
  if gate == 'fastest' then return highest(unfinished, function(p) return num(p, 'step') * num(p, 'batch') end) end
  if gate == 'turn' then
    return {highest(unfinished, function(p) return -math.floor(num(p, 'step') / num(p, 'turn')) end)[1]}
  end
  if gate == 'neediest' then
    return highest(highest(unfinished, function(p) return -num(p, 'step') end), room_of)
  end
  return unfinished
end

local function issue()
  -- want, most that may be open. A match plays for all policies that have steps left; those that gate must have room.
  local answer = {'ok', num(me, 'epoch'), num(me, 'step')}
  local state = redis.call('HGET', J, 'state')
  if state and state ~= 'starting' and state ~= 'running' then return answer, UNCHANGED end
  local n, waiting = tonumber(ARGV[4]), {}
  for _, p in ipairs(policies) do
    if num(p, 'over') == 0 then
      if num(p, 'batch') == 0 then return answer, UNCHANGED end  -- not restored yet
      waiting[#waiting + 1] = p
      n = math.min(n, tonumber(ARGV[5]) - num(p, 'running'))
    end
  end
  local gating = gates(waiting)
  for _, p in ipairs(gating) do n = math.min(n, room_of(p)) end
  if n <= 0 or #gating == 0 then return answer, UNCHANGED end
  local next = next_of_all()
  for seq = next, next + n - 1 do
    for _, p in ipairs(waiting) do redis.call('HSET', p.G, seq, 'r') end
    answer[#answer + 1] = seq
  end
  for _, p in ipairs(waiting) do redis.call('HSET', p.A, 'next', next + n); add(p, 'running', n) end
  return answer
end
"""
"""Lua, part of the script of `admission.py`: issues as many group numbers as the bound allows."""
