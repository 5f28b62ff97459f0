"""The only place that talks to Redis, with the families of keys named below. Redis owns job state, workers and leases.

Keys (`{id}` is a job id of ours):
    job:{id}            hash: spec, state, version, epoch, tenant, name, created, updated, reason, step, steps ...
    job:{id}:events     stream: the job's log; every state change is appended by the script that makes it
    job:{id}:states     stream: of the log, what changed the state, under the same ids; it is never cut
    job:{id}:failures   stream: groups that failed for good, the newest thousand
    jobs:of:{tenant}    sorted set of ids by creation time
    jobs:active         set of ids that are not in a final state
    jobs:ending         set of ids in a final state whose leases and messages are still to be cleared away
    worker:*, workers, leases, leases:held, leader, leader:epoch   who works for whom (lease_table.py)
    adm:{id}, adm:{id}:groups   admission (admission.py)
    spent:*             what jobs and tenants have spent (usage.py)
    artifact:*, stored:*, published:*   what is kept of jobs, and its names (artifacts.py)
    sweep:{id}, sweep:{id}:trials, sweeps:*     sweeps (sweeps.py)
    key:{id}, keys:of:{tenant}, tenants   API keys (keys.py)
    stream:{digest}, streams:of:{key}     credentials to hear a job live (stream_credentials.py)
    streams:open, streams:open:{group}    and who is connected by them (stream_connections.py)
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import orjson

from opentinker.shared.state.active_jobs import ACTIVE, ActiveJobs
from opentinker.shared.state.idempotency import KEPT_S, MADE_BEFORE, job_key, other_body, sweep_key
from opentinker.shared.state.job_scripts import CREATE, PLACE, TRANSITION, UPDATE
from opentinker.shared.state.lease_table import LeaseTable, granted, held_by_another
from opentinker.shared.state.list_rows import label_fields, tenants_key
from opentinker.shared.state.redis_client import connect_redis
from opentinker.shared.state.redis_script import (
    LED,
    LED_BY_ANOTHER,
    UNFENCED,
    LeadersScript,
    Script,
    newest,
    read_field,
    read_hashes,
)
from opentinker.shared.types.core import LABELS, JobRecord, JobState, Lease, split_part
from opentinker.shared.types.errors import Conflict, Fenced, NotFound


class Store(LeaseTable):
    def __init__(self, redis: Any) -> None:
        # redis-py types every reply as bytes or str; ours are str (decode_responses).
        super().__init__(redis)
        self._active = ActiveJobs(redis, self.jobs)
        self._transition = Script(redis, TRANSITION)
        self._place = Script(redis, LED + PLACE)
        self._update = Script(redis, LED + UPDATE)
        self._create = Script(redis, LED + MADE_BEFORE + CREATE)
        self._ended = LeadersScript(redis, "redis.call('SREM', KEYS[1], ARGV[2])")
        self._forget = LeadersScript(redis, "redis.call('DEL', unpack(KEYS))")

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, name: str, user: str = "", password: str = "") -> AsyncIterator[Store]:
        """Connect as `connect_redis` does."""
        async with connect_redis(url, name, user, password) as redis:
            yield cls(redis)

    # --- jobs ---------------------------------------------------------------------------------------------------

    async def create_job(
        self,
        *,
        id: str,
        spec: dict[str, Any],
        tenant: str,
        idempotency: str = "",
        body_hash: str = "",
        key: str = "",
        trace: str = "",
        leader: int = UNFENCED,
    ) -> str:
        """Store a new job in state queued. Returns its id, or that of the job an equal request made before. `key`
        and `trace` are those of JobRecord.

        Raises Conflict if the idempotency key was used with another body; Fenced: another scheduler leads.
        """
        if idempotency and not body_hash:
            raise ValueError("an idempotency key needs the hash of the body")
        now = time.time()
        fields = {
            "spec": orjson.dumps({name: value for name, value in spec.items() if name not in LABELS}).decode(),
            **label_fields(spec),
            "kind": spec["kind"],
            "model": spec["model"]["base"],
            "environment": spec.get("environment", {}).get("name", ""),
            "tenant": tenant,
            "state": JobState.QUEUED.value,
            "version": 0,
            "epoch": 0,
            "created": now,
            "updated": now,
            "step": 0,
            "steps": steps_of(spec),
            "since": now,
            "reason": "",
            "key": key,
            "trace": trace,
        }
        queued = _event("queued", now, state=JobState.QUEUED.value)
        idem, of_sweep = job_key(tenant, idempotency or id), sweep_key(tenant, idempotency or id)
        answer = await self._create(
            keys=[
                f"job:{id}",
                f"job:{id}:events",
                tenants_key("job", tenant),
                ACTIVE,
                idem,
                f"job:{id}:states",
                of_sweep,
            ],
            args=[id, now, orjson.dumps(fields).decode(), queued, body_hash if idempotency else "", KEPT_S, leader],
        )
        if answer[0] == "differs":
            raise other_body(answer[1])
        _raise(id, answer, JobState.QUEUED.value)
        return str(answer[1])

    async def find_idempotent(self, tenant: str, idempotency: str, body_hash: str) -> str | None:
        """The job that an equal request made. Raises Conflict as `create_job` does."""
        job, body = await self.redis.hmget(job_key(tenant, idempotency), "job", "body")
        if job is not None and body != body_hash:
            raise other_body(f"job {job}")
        return None if job is None else str(job)

    async def job_of_key(self, tenant: str, idempotency: str) -> str | None:
        """Return the job that was made under an idempotency key, with any body."""
        job = await self.redis.hget(job_key(tenant, idempotency), "job")
        return None if job is None else str(job)

    async def job(self, id: str) -> JobRecord:
        """Raises NotFound."""
        fields = await self.redis.hgetall(f"job:{id}")
        if not fields:
            raise NotFound(f"no job {id!r}; `opentinker jobs` lists yours")
        return _record(id, fields)

    async def jobs(self, ids: Sequence[str]) -> list[JobRecord]:
        """Return the given jobs that exist. JOB~POLICY is the record of a policy (`JobRecord.part`). A text with a
        colon would name another of a job's keys, and is no job."""
        named = [split_part(id) for id in ids if ":" not in id]
        hashes = await read_hashes(self.redis, [f"job:{job}" for job, _ in named])
        found = [(_record(job, fields), policy) for (job, policy), fields in zip(named, hashes, strict=True) if fields]
        return [job.part(policy) for job, policy in found if policy in ("", *job.policies)]

    async def tenants_of(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the tenants of those jobs that exist, by id."""
        asked = sorted(ids)
        tenants = await read_field(self.redis, [f"job:{id}" for id in asked], "tenant")
        return {id: tenant for id, tenant in zip(asked, tenants, strict=True) if tenant}

    async def jobs_of(self, tenant: str, limit: int, before: str = "") -> list[JobRecord]:
        """The tenant's newest jobs, newest first; of those made before job `before` if it is given.

        Raises NotFound if the tenant has no such job.
        """
        return await self.jobs(await newest(self.redis, tenants_key("job", tenant), limit, before, "job"))

    async def active_jobs(self) -> list[JobRecord]:
        """Jobs not in a final state, oldest first."""
        return await self._active.all()

    async def held_jobs(self) -> list[JobRecord]:
        """Jobs that have begun and are not over, oldest first: a fraction of the active ones where many wait."""
        return await self._active.held()

    async def ending_jobs(self) -> list[str]:
        """Jobs in a final state that `ended` has not been called for."""
        return sorted(await self.redis.smembers("jobs:ending"))

    async def ended(self, id: str, *, leader: int = UNFENCED) -> None:
        """Record that nothing of the job is left to clear away. Raises Fenced."""
        await self._ended(leader=leader, keys=["jobs:ending"], args=[id])

    async def transition(
        self,
        id: str,
        new: JobState,
        *,
        allowed: Sequence[JobState] = (),
        epoch: int = -1,
        event: str | None = None,
        detail: dict[str, Any] | None = None,
        leader: int = UNFENCED,
        leases: Sequence[Lease] = (),
        gpus: Sequence[int] = (),
        tenant: str = "",
        **fields: Any,
    ) -> JobState:
        """The one way to change a job's state: compare-and-set plus event. Returns the state before.

        `allowed` empty means any state that is not final; `detail` goes into the event only. `leases`: granted in the
        same act, on the account of `tenant`; `gpus`: of each of their workers. Raises NotFound, Conflict (state, or a
        worker is another job's), Fenced (epoch, or another scheduler leads).
        """
        now = time.time()
        if new.final:
            fields.setdefault("finished", now)
        line = _event(event or new.value, now, state=new.value, epoch=epoch, **fields, **(detail or {}))
        keys = [f"job:{id}", f"job:{id}:events", ACTIVE, "jobs:ending", _op(id), f"job:{id}:states"]
        args = [id, ",".join(allowed), new.value, epoch, now, _fields(fields), line]
        if leader == UNFENCED and not leases:
            answer = await self._transition(keys=keys, args=args)
        else:
            granted_ = zip(leases, gpus or [0] * len(leases), strict=True)
            parts = [part for lease, number in granted_ for part in granted(lease, tenant, number)]
            more = ["leases", "leases:held", "leader:epoch"]
            answer = await self._place(keys=keys + more, args=[*args, leader, *parts])
        _raise(id, answer, new.value)
        return JobState(answer[1])

    async def update(
        self,
        id: str,
        *,
        epoch: int = -1,
        event: str = "",
        detail: dict[str, Any] | None = None,
        only_active: bool = False,
        failure: bool = False,
        leader: int = UNFENCED,
        **fields: Any,
    ) -> None:
        """Change fields other than the state, and optionally log an event; `failure`: among those that failed for good
        too. Raises NotFound, Fenced (epoch, or another scheduler leads), and Conflict if the job is over and the
        change is meant for an active one (`only_active`). `id` may be JOB~POLICY: the event then names the policy."""
        now = time.time()
        id, policy = split_part(id)
        if policy:
            detail = {"policy": policy, **(detail or {})}
        line = _event(event, now, **(detail or {})) if event else ""
        keys = [f"job:{id}", f"job:{id}:events", _op(id)]
        answer = await self._update(
            keys=[*keys, f"job:{id}:failures"] if failure else keys,
            args=[epoch, now, _fields(fields), line, "1" if only_active else "", leader],
        )
        _raise(id, answer, "update")

    async def forget(self, id: str, *, leader: int = UNFENCED) -> None:
        """Delete everything of a finished job, or of a part of it, but its record, state changes and usage. Raises
        Fenced."""
        gone = (f"job:{id}:events", f"job:{id}:failures", f"adm:{id}", f"adm:{id}:groups", f"spent:step:{id}")
        await self._forget(leader=leader, keys=gone)

    async def epoch(self, id: str) -> int:
        """Return the epoch of the job's newest trainer lease. Raises NotFound."""
        value = await self.redis.hget(f"job:{id}", "epoch")
        if value is None:
            raise NotFound(f"no job {id!r}")
        return int(value)

    async def require_epoch(self, id: str, epoch: int) -> None:
        """Raises Fenced if the job belongs to a higher epoch than this one, NotFound. Before what no script writes."""
        if (newest := await self.epoch(id)) > epoch:
            raise Fenced(f"job {id} belongs to epoch {newest} now")

    async def events(self, id: str, after: str = "0", block_ms: int | None = None) -> list[dict[str, Any]]:
        """Return the events after the given id, oldest first; wait up to `block_ms` (at most 5 s) for one. A trimmed
        log still contains every state change."""
        block_ms = None if block_ms is None else min(block_ms, 5000)
        reply = await self.redis.xread({f"job:{id}:events": after}, count=500, block=block_ms)
        entries = reply[0][1] if reply else []
        if entries:
            entries = await self.redis.xrange(f"job:{id}:states", f"({after}", f"({entries[0][0]}") + entries
        return [{"id": entry_id, **orjson.loads(fields["event"])} for entry_id, fields in entries]

    async def all_events(self, id: str, after: str = "0") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while page := await self.events(id, found[-1]["id"] if found else after):
            found += page
        return found

    async def states(self, id: str) -> list[dict[str, Any]]:
        """Return all events that changed the job's state, oldest first, each with the job's `version` after it."""
        return (await self.states_of([id]))[0]

    async def states_of(self, ids: Sequence[str]) -> list[list[dict[str, Any]]]:
        """Return these events of each of the jobs, in their order."""
        pipe = self.redis.pipeline(transaction=False)
        for id in ids:
            pipe.xrange(f"job:{id}:states")
        return [
            [{**orjson.loads(fields["event"]), "version": int(fields["version"])} for _, fields in entries]
            for entries in await pipe.execute()
        ]

    async def failures(self, id: str, limit: int) -> list[dict[str, Any]]:
        """Return permanent failures, newest first."""
        entries = await self.redis.xrevrange(f"job:{id}:failures", count=limit)
        return [{"id": entry_id, **orjson.loads(fields["event"])} for entry_id, fields in entries]

    async def latest_event(self, id: str, kind: str, among: int = 500) -> dict[str, Any] | None:
        """The newest event of a kind within the newest `among` events."""
        for _, fields in await self.redis.xrevrange(f"job:{id}:events", count=among):
            event: dict[str, Any] = orjson.loads(fields["event"])
            if event["event"] == kind:
                return event
        return None


def _record(id: str, fields: dict[str, str]) -> JobRecord:
    labels = {**fields, "tags": orjson.loads(fields.get("tags") or "[]")}
    spec = {**orjson.loads(fields["spec"]), **{name: labels[name] for name in LABELS if name in fields}}
    return msgspec.convert({**labels, "id": id, "spec": spec}, JobRecord, strict=False)


def steps_of(spec: Mapping[str, Any]) -> int:
    """Return the steps of a job with this spec, or its episodes; 0 if only the trainer can know."""
    if spec["kind"] == "eval":
        return int(spec["evaluation"]["episodes"] * spec["evaluation"]["samples"])
    return int(spec.get("train", {}).get("steps", 0))


def _op(id: str) -> str:
    return f"job:{id}:op:{uuid.uuid4().hex}"


def _fields(fields: dict[str, Any]) -> str:
    """Hash fields for a script. Checked here: a script that fails half-way is not rolled back."""
    for name, value in fields.items():
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
            raise TypeError(f"field {name} = {value!r}: a job's fields are text and finite numbers")
    return orjson.dumps({name: int(v) if isinstance(v, bool) else v for name, v in fields.items()}).decode()


def _event(kind: str, now: float, **detail: Any) -> str:
    return orjson.dumps({"event": kind, "time": now, **detail}).decode()


def _raise(id: str, answer: list[str], wanted: str) -> None:
    match answer[0]:
        case "missing":
            raise NotFound(f"no job {id!r}")
        case "fenced":
            raise Fenced(f"job {id} belongs to epoch {answer[1]} now")
        case "led":
            raise Fenced(LED_BY_ANOTHER)
        case "taken":
            raise held_by_another(answer[1])
        case "conflict":
            raise Conflict(f"job {id} is {answer[1]}: it cannot become {wanted}")
