"""Admission of a job's groups: the Redis script that applies the bound of `staleness.py` and changes the entries of
`group_ledger.py` atomically, and its client."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from opentinker.shared.spec.matches.schedules import Gate
from opentinker.shared.state.group_ledger import ENTRIES, Ledger
from opentinker.shared.state.redis_script import Script, read_field, read_hashes
from opentinker.shared.state.staleness import ISSUE, MAX_OPEN
from opentinker.shared.types.core import Discard, Ending, JobRecord, WeightVersion, parts_of
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.pools import PoolRecords

# KEYS: job, op (ends with `:op:` if the operation may simply be repeated), then adm and groups of each policy. ARGV:
# operation, epoch (-1: anyone), place of the caller's own policy (1, 2...), arguments...
# The job's epoch rises with the lease, that of `adm` when its trainer restores: who had it before writes nothing more.
# `op` remembers for a while what was answered when something changed: a client that lost the reply asks again.
_HELPERS = """
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
"""
_DISPATCH = """
if O then
  local before = redis.call('GET', O)
  if before then return cjson.decode(before) end
end
local owner = math.max(num(me, 'epoch'), tonumber(redis.call('HGET', J, 'epoch') or '0'))
if epoch >= 0 and epoch < owner then return {'fenced', owner} end
local does = {restore = restore, issue = issue, accept = finish, fail = finish, train = consume, discard = consume,
              over = over, commit = commit, clear = clear, version = set_version, pools = pools}
local answer, unchanged = does[op]()
if O and not unchanged then redis.call('SET', O, cjson.encode(answer), 'EX', 120) end
return answer
"""
_SCRIPT = _HELPERS + ENTRIES + ISSUE + _DISPATCH


def admission_of(redis: Any, job: JobRecord, policy: str = "") -> Admission:
    """Return the admission state of a job as its record describes it; asked about `policy`, by default the first."""
    return Admission(redis, job.id, policies=job.policies, policy=policy)


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
        settled: Sequence[int] = (),
        gate: Gate = "all",
        turn: int = 0,
    ) -> None:
        """Start, or start again from a checkpoint at `step`: everything consumed after it is pending again.

        `discarded` counts what was discarded for batches up to `step`; group numbers below `next_seq` were used, also
        if Redis lost them. `position` is of a deterministic job: groups after the checkpoint are forgotten instead, and
        the next one stands at this position of the submission order and starts when the checkpoint's version is served.
        `settled`: groups consumed after the step that `discarded` counts nevertheless, because the job went back to it.
        `trained`: groups in the steps up to `step`, by default a batch each. `gate`: which policies of the job must
        have room, the same for all of them; `turn`: steps per turn, where policies take turns.
        """
        if self._epoch < 0:
            raise ValueError("only a trainer, which has an epoch, restores")
        reasons = orjson.dumps(discarded).decode()
        place = -1 if position is None else position
        bound = (step, max_staleness, groups_per_batch, total)
        done = step * groups_per_batch if trained is None else trained
        await self._call("restore", *bound, reasons, next_seq, place, done, gate, turn, *settled)

    async def issue(self, want: int) -> tuple[WeightVersion, list[int]]:
        """Take up to `want` new group numbers, as many as the staleness bound allows every policy now. A job without
        workers gets none."""
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
        texts = await read_field(self._redis, self._keys[::2], "pools")
        told = [msgspec.json.decode(text, type=PoolRecords) for text in texts if text]
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
        """Return whether a group is running. If it was stored, failed or forgotten, its ticket came a second time."""
        return "r" in await read_field(self._redis, self._keys[1::2], str(seq))

    async def consumed(self) -> list[int]:
        """Return the groups that were trained or discarded, of those that could still be rolled back."""
        entries = await self._redis.hgetall(self._groups)
        return [int(seq) for seq, state in entries.items() if state.startswith(("t:", "d:"))]

    async def running(self) -> list[int]:
        """Groups whose ticket is out."""
        found = await read_hashes(self._redis, self._keys[1::2])
        return sorted({int(seq) for entries in found for seq, state in entries.items() if state == "r"})

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
