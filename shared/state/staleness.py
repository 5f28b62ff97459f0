"""Staleness admission: how many groups may be under way, and where every accepted group went.

The law (AReaL, arXiv 2505.24298 eq. 3, counted in groups): a group may start only while
    trained + pending + running < (max_staleness + version + 1) * groups_per_batch
holds for the job's policy, or for those of its policies that gate: their group is one match, and each policy counts it
by itself. Of the policies that have steps left gate, by the job's schedule (`spec/schedules.py`):
    all         each of them
    fastest     those whose served version stands for the most groups
    turn        the first of those that have had the fewest turns, a turn being a number of steps
    neediest    of those that serve the oldest version, the one with the most room
A policy that has trained all its groups gates no longer, also while its last weights are evaluated.
`trained` counts one batch per step here, also where a step took more (`extra`).
Failed and discarded groups leave the count and so are replaced. A job never starts more than steps * groups_per_batch,
has at most MAX_OPEN groups running, and starts none unless it holds workers. In its turn a policy starts no more than
the turn needs.

A group's life, one entry per group in `adm:{job}:groups`, changed only by the script below. A job with several policies
has `adm:{job}~{policy}` and `adm:{job}~{policy}:groups` for each of them:
    issue -> r --accept--> p --train--> t:<batch>      batch = number of the step it was consumed for (1, 2, ...)
             |             '--discard-> d:<batch>:<reason>
             '--fail--> (removed, counted)
`restore(step)` turns t and d entries above a checkpointed step back into p; `commit(batch)` deletes those up to a batch
that can no longer be rolled back: the trainer commits one checkpoint late, because the newest may be damaged.

Ledger, always: accepted = trained + discarded + pending.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from opentinker.shared.spec.schedules import Gate
from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.core import Discard, Ending, JobRecord, WeightVersion, parts_of
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.pools import PoolRecords

MAX_OPEN = 4096
"""Groups of one job that run or wait for a rollout worker, regardless of the staleness bound: each is a ticket in a
stream that all jobs share."""

# KEYS: job, op (ends with `:op:` if the operation may simply be repeated), then adm and groups of each policy. ARGV:
# operation, epoch (-1: anyone), place of the caller's own policy (1, 2...), arguments...
# The job's epoch rises with the lease, that of `adm` when its trainer restores: who had it before writes nothing more.
# `op` remembers for a while what was answered when something changed: a client that lost the reply asks again.
_SCRIPT = """
local J, O = KEYS[1], string.sub(KEYS[2], -4) ~= ':op:' and KEYS[2]
local op, epoch, own = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local UNCHANGED = true  -- second result of an operation that did nothing: it may well be repeated
local policies = {}
for i = 3, #KEYS, 2 do policies[#policies + 1] = {A = KEYS[i], G = KEYS[i + 1]} end
local me = policies[own]
local function num(p, field) return tonumber(redis.call('HGET', p.A, field) or '0') end
local function add(p, field, by) redis.call('HINCRBY', p.A, field, by) end
local function tag_of(state) return tonumber(string.match(state, '^[td]:(%d+)') or '-1') end

local function next_of_all()
  local next = 0
  for _, p in ipairs(policies) do next = math.max(next, num(p, 'next')) end
  return next
end

local function restore()
  -- step, max_staleness, groups_per_batch, total, discarded by reason (JSON), next_seq, position (-1: none), trained,
  -- gate, turn (in steps)
  local step, batch, position = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[10])
  local trained = tonumber(ARGV[11])
  local pending, running, discarded, undone = 0, 0, 0, {}
  local entries = redis.call('HGETALL', me.G)
  for i = 1, #entries, 2 do
    local seq, state = entries[i], entries[i + 1]
    local open = tag_of(state) > step or state == 'p' or state == 'r'
    local reason = tag_of(state) > step and string.match(state, '^d:%d+:(.*)')
    if reason then undone[reason] = (undone[reason] or 0) + 1 end
    if position >= 0 and open then redis.call('HDEL', me.G, seq)
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
      if ended then counts[reason] = num(me, field) - (undone[reason] or 0) end
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
  redis.call('HSET', me.A, 'epoch', epoch, 'step', served, 'eta', ARGV[5], 'batch', batch, 'total', ARGV[7],
             'trained', trained, 'extra', trained - step * batch, 'pending', pending, 'running', running,
             'accepted', trained + discarded + pending, 'next', next,
             'shift', position >= 0 and next - position or 0, 'gate', ARGV[12], 'turn', ARGV[13])
  return {'ok'}
end

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

local function version() redis.call('HSET', me.A, 'step', ARGV[4]); return {'ok'} end

if O then
  local before = redis.call('GET', O)
  if before then return cjson.decode(before) end
end
local owner = math.max(num(me, 'epoch'), tonumber(redis.call('HGET', J, 'epoch') or '0'))
if epoch >= 0 and epoch < owner then return {'fenced', owner} end
local does = {restore = restore, issue = issue, accept = finish, fail = finish, train = consume, discard = consume,
              over = over, commit = commit, clear = clear, version = version, pools = pools}
local answer, unchanged = does[op]()
if O and not unchanged then redis.call('SET', O, cjson.encode(answer), 'EX', 120) end
return answer
"""


def admission_of(redis: Any, job: JobRecord, policy: str = "") -> Admission:
    """Return the admission state of a job as its record describes it; asked about `policy`, by default the first."""
    return Admission(redis, job.id, policies=job.policies, policy=policy)


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


def admission_keys(job: str, policies: Sequence[str]) -> list[str]:
    """Return the keys that admission has of a job."""
    return [key for part in parts_of(job, policies) for key in (f"adm:{part}", f"adm:{part}:groups")]


class Admission:
    """One job's admission state. `epoch` of a trainer is checked by the script: a lower one raises Fenced.

    `policies`: names of the job's policies, empty if it has one without a name. `policy`: the one that is asked about,
    restored, trained, discarded and committed; by default the first.
    """

    def __init__(
        self, redis: Any, job: str, epoch: int = -1, *, policies: Sequence[str] = (), policy: str = ""
    ) -> None:
        self._redis = redis
        self._job = job
        self._keys = admission_keys(job, policies)
        self._own = policies.index(policy) if policy else 0
        self._adm, self._groups = self._keys[2 * self._own : 2 * self._own + 2]
        self._epoch = epoch
        self._script = Script(redis, _SCRIPT)

    async def _call(self, op: str, *args: Any, once: bool = False) -> list[Any]:
        """`once`: a repetition by the client, after the connection broke, is answered and not done again."""
        memo = f"adm:{self._job}:op:{uuid.uuid4().hex if once else ''}"
        keys = [f"job:{self._job}", memo, *self._keys]
        answer: list[Any] = await self._script(keys=keys, args=[op, self._epoch, self._own + 1, *args])
        if answer[0] == "fenced":
            raise Fenced(f"epoch {answer[1]} owns the job, this is epoch {self._epoch}")
        return answer

    async def restore(
        self,
        *,
        step: int,
        max_staleness: int,
        groups_per_batch: int,
        total: int,
        discarded: dict[str, int],
        next_seq: int = 0,
        position: int | None = None,
        trained: int | None = None,
        gate: Gate = "all",
        turn: int = 0,
    ) -> None:
        """Start, or start again from a checkpoint at `step`: everything consumed after it is pending again.

        `discarded` counts what was discarded for batches up to `step`; group numbers below `next_seq` were used, also
        if Redis lost them. `position` is of a deterministic job: groups after the checkpoint are forgotten instead, and
        the next one stands at this position of the submission order and starts when the checkpoint's version is served.
        `trained`: groups in the steps up to `step`, by default a batch each. `gate`: which policies of the job must
        have room, the same for all of them; `turn`: steps per turn, where policies take turns.
        """
        if self._epoch < 0:
            raise ValueError("only a trainer, which has an epoch, restores")
        reasons = orjson.dumps(discarded).decode()
        place = -1 if position is None else position
        law = (step, max_staleness, groups_per_batch, total)
        done = step * groups_per_batch if trained is None else trained
        await self._call("restore", *law, reasons, next_seq, place, done, gate, turn)

    async def issue(self, want: int) -> tuple[WeightVersion, list[int]]:
        """Take up to `want` new group numbers, as many as the law allows every policy now; none for a job that holds no
        workers."""
        answer = await self._call("issue", want, MAX_OPEN, once=True)
        return WeightVersion(int(answer[1]), int(answer[2])), [int(seq) for seq in answer[3:]]

    async def shift(self) -> int:
        """Return the number to subtract from a group's number for its position in the submission order: numbers that a
        deterministic job has used for steps that were rolled back."""
        return int(await self._redis.hget(self._adm, "shift") or 0)

    async def set_version(self, step: int) -> None:
        """The rollout workers have weights of `step` now."""
        await self._call("version", step)

    async def set_pools(self, pools: PoolRecords) -> None:
        """The opponent pools of the policy are these from now on."""
        await self._call("pools", msgspec.json.encode(pools).decode())

    async def pools(self) -> PoolRecords:
        """Return the opponent pools of all policies."""
        pipe = self._redis.pipeline(transaction=False)
        for adm in self._keys[::2]:
            pipe.hget(adm, "pools")
        told = [msgspec.json.decode(text, type=PoolRecords) for text in await pipe.execute() if text]
        return {name: pool for pools in told for name, pool in pools.items()}

    async def accept(self, seq: int) -> str:
        """A group is stored: for all policies. Returns the policy's own state of it: 'ok' the first time; 'p', 't', 'd'
        if it was accepted before; 'unknown' if it left."""
        return str((await self._call("accept", seq, once=True))[1 + 3 * self._own])

    async def fail(self, seq: int, reason: Ending | str) -> tuple[int, int] | None:
        """A group could not be rolled out. Returns (failed, accepted) so far, or None if it was not running."""
        answer = (await self._call("fail", seq, str(reason), once=True))[1:]
        counts = [answer[at + 1 : at + 3] for at in range(0, len(answer), 3) if answer[at] == "ok"]
        return (int(counts[0][0]), int(counts[0][1])) if counts else None

    async def train(self, batch: int, seqs: list[int]) -> int:
        """Groups consumed by optimizer step number `batch`. Returns how many were pending."""
        return int((await self._call("train", batch, "", *seqs, once=True))[1])

    async def discard(self, batch: int, reason: Discard, seqs: list[int]) -> int:
        if not seqs:
            return 0
        return int((await self._call("discard", batch, str(reason), *seqs, once=True))[1])

    async def finish(self, reason: Discard) -> int:
        """The policy has made its last step; groups that start from now on do not wait for it. Returns how many pending
        groups were discarded for it, with `reason`."""
        return int((await self._call("over", str(reason), once=True))[1])

    async def commit(self, batch: int) -> None:
        """A checkpoint covers everything up to step number `batch`."""
        await self._call("commit", batch)

    async def clear(self) -> None:
        """Forget the groups of a finished job and issue none from now on. The ledger stays."""
        await self._call("clear")

    async def is_running(self, seq: int) -> bool:
        """False if the group was stored, failed or forgotten: its ticket came a second time."""
        pipe = self._redis.pipeline(transaction=False)
        for groups in self._keys[1::2]:
            pipe.hget(groups, str(seq))
        return "r" in await pipe.execute()

    async def running(self) -> list[int]:
        """Groups whose ticket is out."""
        pipe = self._redis.pipeline(transaction=False)
        for groups in self._keys[1::2]:
            pipe.hgetall(groups)
        return sorted({int(seq) for entries in await pipe.execute() for seq, state in entries.items() if state == "r"})

    async def ledger(self) -> Ledger:
        fields = await self._redis.hgetall(self._adm)

        def number(name: str) -> int:
            return int(fields.get(name, 0))

        def by(prefix: str) -> dict[str, int]:
            return {name.removeprefix(prefix): int(v) for name, v in fields.items() if name.startswith(prefix)}

        return Ledger(
            issued=number("next"),
            running=number("running"),
            accepted=number("accepted"),
            trained=number("trained"),
            pending=number("pending"),
            discarded=by("discard:"),
            failed=by("fail:"),
            version=WeightVersion(number("epoch"), number("step")),
        )
