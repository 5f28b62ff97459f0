"""Sweeps in Redis. The leading scheduler writes trials before it submits their jobs, so that another one continues with
the same trials.

Keys:
    sweep:{id}           hash: name, tenant, state, table, base ...
    sweep:{id}:trials    hash: number -> Trial, as JSON
    sweeps:of:{tenant}   sorted set of ids by creation time
    sweeps:active        set of ids that run, or whose jobs are still to be cancelled
    sweeps:idem:{tenant}:{key}   hash: sweep that was made under an idempotency key, and hash of its body
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from opentinker.shared.spec.sweeps.uses import uses_of
from opentinker.shared.state.idempotency import KEPT_S, MADE_BEFORE, job_key, other_body, sweep_key
from opentinker.shared.state.list_rows import tenants_key
from opentinker.shared.state.notifications import seen_key
from opentinker.shared.state.redis_script import UNFENCED, LeadersScript, Script, newest, read_field, read_hashes
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.sweeps import SweepProgress, SweepRecord, SweepState, SweepSummary, Trial, Undelivered

ACTIVE = "sweeps:active"
JSON_FIELDS = ("table", "base", "uses", "progress", "tags", "undelivered")
SUMMARY_FIELDS = [name for name in SweepSummary.__struct_fields__ if name != "id"]
T = TypeVar("T", bound=SweepSummary)

# KEYS sweep, of tenant, active, idempotency, idempotency of jobs. ARGV: id, now, fields, body hash ('' = no key),
# ttl seconds
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return {'ok', ARGV[1]} end
local made = made_before(KEYS[4], 'sweep', KEYS[5], 'job', ARGV[1], ARGV[4], ARGV[5])
if made then return made end
for key, value in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', KEYS[1], key, value) end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
return {'ok', ARGV[1]}
"""

# KEYS sweep. ARGV: leader, state, reason, now. Answers the state before.
_MOVE = """
local before = redis.call('HGET', KEYS[1], 'state')
if before == 'running' then
  redis.call('HSET', KEYS[1], 'state', ARGV[2], 'reason', ARGV[3], 'updated', ARGV[4], 'finished', ARGV[4])
end
return before
"""

# KEYS sweep, trials, of tenant, active, idempotency. ARGV: id
_DELETE = """
if redis.call('SISMEMBER', KEYS[4], ARGV[1]) == 1 then return 'active' end
if redis.call('HGET', KEYS[5], 'sweep') == ARGV[1] then redis.call('DEL', KEYS[5]) end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
return 'ok'
"""

# KEYS sweep, trials. ARGV: leader, now, progress, then number and trial of each
_SAVE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
redis.call('HSET', KEYS[1], 'updated', ARGV[2], 'progress', ARGV[3])
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 'ok'
"""

# KEYS sweep. ARGV: what could not be delivered
_UNDELIVERED = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
local all = cjson.decode(redis.call('HGET', KEYS[1], 'undelivered') or '[]')
table.insert(all, cjson.decode(ARGV[1]))
redis.call('HSET', KEYS[1], 'undelivered', cjson.encode(all))
return 'ok'
"""


class SweepStore:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._create = Script(redis, MADE_BEFORE + _CREATE)
        self._move = LeadersScript(redis, _MOVE)
        self._save = LeadersScript(redis, _SAVE)
        self._delete = Script(redis, _DELETE)
        self._undelivered = Script(redis, _UNDELIVERED)
        self._end = LeadersScript(redis, "redis.call('SREM', KEYS[1], ARGV[2]) redis.call('DEL', KEYS[2])")

    async def create(self, sweep: SweepRecord, idempotency: str = "", body_hash: str = "") -> str:
        """Store a new sweep. Returns its id, or that of the sweep which an equal request made before. Raises Conflict
        if the idempotency key was used with another body."""
        fields = msgspec.to_builtins(sweep) | {"idempotency": idempotency}
        fields |= {name: orjson.dumps(fields[name]).decode() for name in JSON_FIELDS}
        del fields["id"]
        by = sweep.tenant, idempotency or sweep.id
        answer = await self._create(
            keys=[f"sweep:{sweep.id}", tenants_key("sweep", sweep.tenant), ACTIVE, sweep_key(*by), job_key(*by)],
            args=[
                sweep.id,
                sweep.created,
                orjson.dumps(fields).decode(),
                body_hash if idempotency else "",
                KEPT_S,
            ],
        )
        if answer[0] == "differs":
            raise other_body(answer[1])
        return str(answer[1])

    async def find_idempotent(self, tenant: str, idempotency: str, body_hash: str) -> str | None:
        """Return the sweep that an equal request made. Raises Conflict as `create` does."""
        sweep, body = await self._redis.hmget(sweep_key(tenant, idempotency), "sweep", "body")
        if sweep is not None and body != body_hash:
            raise other_body(f"sweep {sweep}")
        return None if sweep is None else str(sweep)

    async def made_by(self, tenant: str, idempotency: str) -> str | None:
        """Return the sweep that was made under an idempotency key, with any body."""
        sweep = await self._redis.hget(sweep_key(tenant, idempotency), "sweep")
        return None if sweep is None else str(sweep)

    async def sweeps(self, ids: Sequence[str]) -> list[SweepRecord]:
        """Return those of the given ones that exist."""
        found = await read_hashes(self._redis, [f"sweep:{id}" for id in ids])
        return [_record(id, fields, SweepRecord) for id, fields in zip(ids, found, strict=True) if fields]

    async def sweep(self, id: str) -> SweepRecord:
        """Raises NotFound."""
        for found in await self.sweeps([id]):
            return found
        raise NotFound(f"no sweep {id!r}")

    async def tenant(self, id: str) -> str:
        """Raises NotFound."""
        if (tenant := await self._redis.hget(f"sweep:{id}", "tenant")) is None:
            raise NotFound(f"no sweep {id!r}")
        return str(tenant)

    async def of(self, tenant: str, limit: int, before: str = "") -> list[SweepSummary]:
        """Return the tenant's newest sweeps, newest first; of those made before `before` if it is given. Raises
        NotFound if the tenant has no such sweep."""
        return await self.summaries(await newest(self._redis, tenants_key("sweep", tenant), limit, before, "sweep"))

    async def summaries(self, ids: Sequence[str]) -> list[SweepSummary]:
        """Return those of the given ones that exist."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            pipe.hmget(f"sweep:{id}", SUMMARY_FIELDS)
        rows = [dict(zip(SUMMARY_FIELDS, values, strict=True)) for values in await pipe.execute()]
        return [_record(id, fields, SweepSummary) for id, fields in zip(ids, rows, strict=True) if fields["name"]]

    async def active(self) -> list[str]:
        """Return ids of sweeps that run, or whose jobs are still to be cancelled."""
        return sorted(await self._redis.smembers(ACTIVE))

    async def active_uses(self) -> dict[str, list[str]]:
        """Return the versions of uploads and checkpoints that their jobs name."""
        ids = await self.active()
        texts = await read_field(self._redis, [f"sweep:{id}" for id in ids], "uses")
        found = {id: orjson.loads(text) for id, text in zip(ids, texts, strict=True) if text is not None}
        earlier = await self.sweeps([id for id in ids if id not in found])  # of a release that did not write them
        return found | {sweep.id: uses_of(sweep.table, sweep.base) for sweep in earlier}

    async def is_active(self, id: str) -> bool:
        """Return whether a sweep runs, or has jobs that are still to be cancelled."""
        return bool(await self._redis.sismember(ACTIVE, id))

    async def count_active(self, tenant: str) -> int:
        """Return how many of these are the tenant's."""
        return (await read_field(self._redis, [f"sweep:{id}" for id in await self.active()], "tenant")).count(tenant)

    async def trials(self, id: str) -> list[Trial]:
        """Return its trials, by number."""
        found = [msgspec.json.decode(text, type=Trial) for text in await self._redis.hvals(f"sweep:{id}:trials")]
        return sorted(found, key=lambda trial: trial.number)

    async def job_ids(self, id: str) -> dict[int, list[str]]:
        """Return the ids of each trial's jobs, empty for those that were not submitted. Reads nothing else of them."""
        found = await self._redis.hgetall(f"sweep:{id}:trials")
        return {int(number): [job["id"] for job in orjson.loads(text)["jobs"]] for number, text in found.items()}

    async def save(self, id: str, trials: Sequence[Trial], progress: SweepProgress, *, leader: int = UNFENCED) -> None:
        """Store new and changed trials. Raises Fenced, and NotFound if the sweep was deleted."""
        parts = [part for trial in trials for part in (trial.number, msgspec.json.encode(trial).decode())]
        keys, told = [f"sweep:{id}", f"sweep:{id}:trials"], msgspec.json.encode(progress).decode()
        if await self._save(leader=leader, keys=keys, args=[time.time(), told, *parts]) == "missing":
            raise NotFound(f"no sweep {id!r}")

    async def end(self, id: str, state: SweepState, reason: str = "", *, leader: int = UNFENCED) -> SweepState:
        """End a sweep that runs. Returns the state before, which may be final already. Raises NotFound, Fenced."""
        before = await self._move(leader=leader, keys=[f"sweep:{id}"], args=[state.value, reason, time.time()])
        if before is None:
            raise NotFound(f"no sweep {id!r}")
        return SweepState(before)

    async def add_undelivered(self, id: str, given_up: Undelivered) -> None:
        """Record a message that was given up. Raises NotFound."""
        text = msgspec.json.encode(given_up).decode()
        if await self._undelivered(keys=[f"sweep:{id}"], args=[text]) == "missing":
            raise NotFound(f"no sweep {id!r}")

    async def ended(self, id: str, *, leader: int = UNFENCED) -> None:
        """No job of the sweep is left to cancel, and all of it was told. Raises Fenced."""
        await self._end(leader=leader, keys=[ACTIVE, seen_key(id)], args=[id])

    async def delete(self, id: str, tenant: str) -> None:
        """Delete the record of a sweep, its trials and its idempotency key. Raises Conflict while it is active."""
        key = await self._redis.hget(f"sweep:{id}", "idempotency")
        keys = [f"sweep:{id}", f"sweep:{id}:trials", tenants_key("sweep", tenant), ACTIVE, sweep_key(tenant, key or id)]
        if await self._delete(keys=keys, args=[id]) == "active":
            raise Conflict(f"sweep {id} runs, or its jobs are still being cancelled")


def _record(id: str, fields: Mapping[str, str | None], kind: type[T]) -> T:
    """A field that an earlier release did not write is absent, and has its default; labels were in the base alone."""
    there: dict[str, Any] = {name: text for name, text in fields.items() if text is not None}
    there |= {name: orjson.loads(there[name]) for name in JSON_FIELDS if name in there}
    if "base" in there and "tags" not in there:
        there |= {name: there["base"][name] for name in ("project", "tags", "notes") if name in there["base"]}
    return msgspec.convert({**there, "id": id}, kind, strict=False)
