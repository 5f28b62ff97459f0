"""Staleness admission: how many groups may be under way, and where every accepted group went.

The law (AReaL, arXiv 2505.24298 eq. 3, counted in groups): a group may start only while
    trained + pending + running < (max_staleness + version + 1) * groups_per_batch
Failed and discarded groups leave the count and so are replaced. A job never starts more than steps * groups_per_batch,
has at most MAX_OPEN groups running, and starts none unless it holds workers.

A group's life, one entry per group in `adm:{job}:groups`, changed only by the script below:
    issue -> r --accept--> p --train--> t:<batch>      batch = number of the step it was consumed for (1, 2, ...)
             |             '--discard-> d:<batch>:<reason>
             '--fail--> (removed, counted)
`restore(step)` turns t and d entries above a checkpointed step back into p; `commit(batch)` deletes those up to a batch
that can no longer be rolled back: the trainer commits one checkpoint late, because the newest may be damaged.

Ledger, always: accepted = trained + discarded + pending.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import orjson

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.core import Discard, Ending, WeightVersion
from opentinker.shared.types.errors import Fenced

MAX_OPEN = 4096
"""Groups of one job that run or wait for a rollout worker, regardless of the staleness bound: each is a ticket in a
stream that all jobs share."""

# KEYS: adm, groups, job, op (optional). ARGV: operation, epoch (-1: anyone), arguments...
# The job's epoch rises with the lease, that of `adm` when its trainer restores: who had it before writes nothing more.
# `op` remembers for a while what was answered when something changed: a client that lost the reply asks again.
_SCRIPT = """
local A, G, J, O = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local op, epoch = ARGV[1], tonumber(ARGV[2])
local UNCHANGED = true  -- second result of an operation that did nothing: it may well be repeated
local function num(field) return tonumber(redis.call('HGET', A, field) or '0') end
local function add(field, by) redis.call('HINCRBY', A, field, by) end
local function tag_of(state) return tonumber(string.match(state, '^[td]:(%d+)') or '-1') end

local function restore()
  -- step, max_staleness, groups_per_batch, total, discarded by reason (JSON), next_seq, position (-1: none)
  local step, batch, position = tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[9])
  local pending, running, discarded = 0, 0, 0
  local entries = redis.call('HGETALL', G)
  for i = 1, #entries, 2 do
    local seq, state = entries[i], entries[i + 1]
    local open = tag_of(state) > step or state == 'p' or state == 'r'
    if position >= 0 and open then redis.call('HDEL', G, seq)
    elseif tag_of(state) > step then redis.call('HSET', G, seq, 'p'); pending = pending + 1
    elseif state == 'p' then pending = pending + 1
    elseif state == 'r' then running = running + 1 end
  end
  for _, field in ipairs(redis.call('HKEYS', A)) do
    if string.sub(field, 1, 8) == 'discard:' then redis.call('HDEL', A, field) end
  end
  for reason, count in pairs(cjson.decode(ARGV[7])) do
    redis.call('HSET', A, 'discard:' .. reason, count); discarded = discarded + count
  end
  local next = math.max(num('next'), tonumber(ARGV[8]))
  local served = step
  if position >= 0 then served = step - 1 end  -- nothing starts before these very weights are served
  redis.call('HSET', A, 'epoch', epoch, 'step', served, 'eta', ARGV[4], 'batch', batch, 'total', ARGV[6],
             'trained', step * batch, 'pending', pending, 'running', running,
             'accepted', step * batch + discarded + pending, 'next', next,
             'shift', position >= 0 and next - position or 0)
  return {'ok'}
end

local function issue()
  -- want, most that may be open
  local answer = {'ok', num('epoch'), num('step')}
  local state = redis.call('HGET', J, 'state')
  if state and state ~= 'starting' and state ~= 'running' then return answer, UNCHANGED end
  local batch = num('batch')
  local busy = num('trained') + num('pending') + num('running')
  local max_staleness, version = num('eta'), num('step')  -- names of the fields in Redis, kept for running jobs
  local room = math.min((max_staleness + version + 1) * batch, num('total')) - busy
  local n = math.max(0, math.min(tonumber(ARGV[3]), room, tonumber(ARGV[4]) - num('running')))
  for _ = 1, n do
    local seq = redis.call('HINCRBY', A, 'next', 1) - 1
    redis.call('HSET', G, seq, 'r')
    answer[#answer + 1] = seq
  end
  if n == 0 then return answer, UNCHANGED end
  add('running', n)
  return answer
end

local function finish()
  -- accept: seq; fail: seq, reason
  local state = redis.call('HGET', G, ARGV[3])
  if not state then return {'unknown'}, UNCHANGED end
  if state ~= 'r' then return {string.sub(state, 1, 1)}, UNCHANGED end
  add('running', -1)
  if op == 'fail' then
    redis.call('HDEL', G, ARGV[3]); add('failed', 1); add('fail:' .. ARGV[4], 1)
    return {'ok', num('failed'), num('accepted')}
  end
  redis.call('HSET', G, ARGV[3], 'p'); add('pending', 1); add('accepted', 1)
  return {'ok'}
end

local function consume()
  -- batch number, reason ('' for train), seqs...
  local done = 0
  local becomes = 'd:' .. ARGV[3] .. ':' .. ARGV[4]
  if op == 'train' then becomes = 't:' .. ARGV[3] end
  for i = 5, #ARGV do
    if redis.call('HGET', G, ARGV[i]) == 'p' then
      done = done + 1
      redis.call('HSET', G, ARGV[i], becomes)
    end
  end
  if done == 0 then return {'ok', 0}, UNCHANGED end
  add('pending', -done)
  if op == 'train' then add('trained', done) else add('discard:' .. ARGV[4], done) end
  return {'ok', done}
end

local function commit()
  -- batch number
  local entries = redis.call('HGETALL', G)
  for i = 1, #entries, 2 do
    local tag = tag_of(entries[i + 1])
    if tag >= 0 and tag <= tonumber(ARGV[3]) then redis.call('HDEL', G, entries[i]) end
  end
  return {'ok'}
end

local function clear()
  -- 'total' says how many groups the job may start
  redis.call('DEL', G); redis.call('HDEL', A, 'total')
  return {'ok'}
end

local function version() redis.call('HSET', A, 'step', ARGV[3]); return {'ok'} end

if O then
  local before = redis.call('GET', O)
  if before then return cjson.decode(before) end
end
local owner = math.max(num('epoch'), tonumber(redis.call('HGET', J, 'epoch') or '0'))
if epoch >= 0 and epoch < owner then return {'fenced', owner} end
local does = {restore = restore, issue = issue, accept = finish, fail = finish, train = consume, discard = consume,
              commit = commit, clear = clear, version = version}
local answer, unchanged = does[op]()
if O and not unchanged then redis.call('SET', O, cjson.encode(answer), 'EX', 120) end
return answer
"""


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


class Admission:
    """One job's admission state. `epoch` of a trainer is checked by the script: a lower one raises Fenced."""

    def __init__(self, redis: Any, job: str, epoch: int = -1) -> None:
        self._redis = redis
        self._keys = [f"adm:{job}", f"adm:{job}:groups", f"job:{job}"]
        self._epoch = epoch
        self._script = Script(redis, _SCRIPT)

    async def _call(self, op: str, *args: Any, once: bool = False) -> list[Any]:
        """`once`: a repetition by the client, after the connection broke, is answered and not done again."""
        keys = [*self._keys, f"{self._keys[0]}:op:{uuid.uuid4().hex}"] if once else self._keys
        answer: list[Any] = await self._script(keys=keys, args=[op, self._epoch, *args])
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
    ) -> None:
        """Start, or start again from a checkpoint at `step`: everything consumed after it is pending again.

        `discarded` counts what was discarded for batches up to `step`; group numbers below `next_seq` were used, also
        if Redis lost them. `position` is of a deterministic job: groups after the checkpoint are forgotten instead, and
        the next one stands at this position of the submission order and starts when the checkpoint's version is served.
        """
        if self._epoch < 0:
            raise ValueError("only a trainer, which has an epoch, restores")
        reasons = orjson.dumps(discarded).decode()
        place = -1 if position is None else position
        await self._call("restore", step, max_staleness, groups_per_batch, total, reasons, next_seq, place)

    async def issue(self, want: int) -> tuple[WeightVersion, list[int]]:
        """Take up to `want` new group numbers, as many as the law allows now; none for a job that holds no workers."""
        answer = await self._call("issue", want, MAX_OPEN, once=True)
        return WeightVersion(int(answer[1]), int(answer[2])), [int(seq) for seq in answer[3:]]

    async def shift(self) -> int:
        """Return the number to subtract from a group's number for its position in the submission order: numbers that a
        deterministic job has used for steps that were rolled back."""
        return int(await self._redis.hget(self._keys[0], "shift") or 0)

    async def set_version(self, step: int) -> None:
        """The rollout workers have weights of `step` now."""
        await self._call("version", step)

    async def accept(self, seq: int) -> str:
        """A group is stored. 'ok' the first time; 'p', 't', 'd' if it was accepted before; 'unknown' if it left."""
        return str((await self._call("accept", seq, once=True))[0])

    async def fail(self, seq: int, reason: Ending | str) -> tuple[int, int] | None:
        """A group could not be rolled out. Returns (failed, accepted) so far, or None if it was not running."""
        answer = await self._call("fail", seq, str(reason), once=True)
        return (int(answer[1]), int(answer[2])) if answer[0] == "ok" else None

    async def train(self, batch: int, seqs: list[int]) -> int:
        """Groups consumed by optimizer step number `batch`. Returns how many were pending."""
        return int((await self._call("train", batch, "", *seqs, once=True))[1])

    async def discard(self, batch: int, reason: Discard, seqs: list[int]) -> int:
        if not seqs:
            return 0
        return int((await self._call("discard", batch, str(reason), *seqs, once=True))[1])

    async def commit(self, batch: int) -> None:
        """A checkpoint covers everything up to step number `batch`."""
        await self._call("commit", batch)

    async def clear(self) -> None:
        """Forget the groups of a finished job and issue none from now on. The ledger stays."""
        await self._call("clear")

    async def is_running(self, seq: int) -> bool:
        """False if the group was stored, failed or forgotten: its ticket came a second time."""
        return bool(await self._redis.hget(self._keys[1], str(seq)) == "r")

    async def running(self) -> list[int]:
        """Groups whose ticket is out."""
        entries = await self._redis.hgetall(self._keys[1])
        return sorted(int(seq) for seq, state in entries.items() if state == "r")

    async def ledger(self) -> Ledger:
        fields = await self._redis.hgetall(self._keys[0])

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
