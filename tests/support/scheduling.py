"""A scheduler's surroundings: contexts over the real servers, and workers that only beat and follow leases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest
import structlog

from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.services.scheduler.service import serve
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import Subject
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.workers import Gpu, WorkerInfo
from tests.conftest import Server, soon, until
from tests.support.api import OPERATOR_FILE, Http, bearing
from tests.support.factories import make_spec

T = TypeVar("T")
BEAT_S = 0.05
TTL_S = 0.5
"""The scheduler's patience with a worker that ignores its lease, and with everybody when it has just started."""
ALIVE_S = 600.0
"""What `die` takes away at once."""


@asynccontextmanager
async def context(nats: Server, valkey: Server, worker: str, data_dir: Path, **settings: Any) -> AsyncIterator[Context]:
    chosen = Settings(
        nats_url=nats.url,
        redis_url=valkey.url,
        data_dir=data_dir,
        http_port=0,
        admin_key_file=OPERATOR_FILE,
        heartbeat_s=BEAT_S,
        **({"worker_ttl_s": TTL_S, "queue_retry_s": 0.01} | settings),
    )
    async with Bus.connect(nats.url, worker) as bus, Store.connect(valkey.url, worker) as store:
        await bus.ensure_streams()
        yield Context(
            service="scheduler", worker=worker, settings=chosen, bus=bus, store=store, log=structlog.get_logger()
        )


@asynccontextmanager
async def scheduler(
    ctx: Context, gateway: Gateway | None = None, replicas: InferenceRouter | None = None
) -> AsyncIterator[str]:
    """The whole service, in this process; gives its URL. Leaves as after SIGTERM."""
    ctx.stopping.clear()
    ctx.detail.clear()
    task = asyncio.create_task(serve(ctx, gateway, replicas))
    try:
        await until(lambda: task.done() or ctx.detail.get("http_port"))
        if task.done():
            task.result()
        yield f"http://127.0.0.1:{ctx.detail['http_port']}"
    finally:
        ctx.stopping.set()
        await soon(task)


@asynccontextmanager
async def served(nats: Server, valkey: Server, data_dir: Path) -> AsyncIterator[tuple[Context, Http]]:
    """A scheduler on these servers, and the operator who asks it."""
    async with (
        context(nats, valkey, "scheduler-0", data_dir) as ctx,
        scheduler(ctx) as url,
        aiohttp.ClientSession(headers=bearing()) as session,
    ):
        yield ctx, Http(session, url)


def built_with(patch: pytest.MonkeyPatch, module: ModuleType, kind: type, **options: Any) -> None:
    """Have the module construct objects of this class with these options from now on."""
    patch.setattr(module, kind.__name__, partial(kind, **options))


class FakeWorker:
    """Beats, and says that it works for whoever leases it."""

    def __init__(self, store: Store, id: str, pool: Pool) -> None:
        self.store = store
        self.info = WorkerInfo(id=id, incarnation="", pool=pool, host="here", pid=1)
        self.obeys = True
        self.leaves = True
        """It ends at once when it is taken back."""
        self.drains = False
        """It was told to stop, and ends what it has begun."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> FakeWorker:
        self.info = msgspec.structs.replace(
            self.info, incarnation=uuid.uuid4().hex[:12], job=None, epoch=0, status="idle"
        )
        await self.store.beat(self.info, ALIVE_S)
        self._task = asyncio.create_task(self._live())
        return self

    async def _live(self) -> None:
        while True:
            lease = await self.lease()
            mine = lease if lease and lease.incarnation == self.info.incarnation and self.obeys else None
            if mine is not None and mine.leaves_by and self.leaves:
                mine = None
            status = "ready" if mine or self.info.pool in (Pool.ENV, Pool.REFERENCE) else "idle"
            self.info = msgspec.structs.replace(
                self.info,
                job=mine.job if mine else None,
                epoch=mine.epoch if mine else 0,
                status="draining" if self.drains else status,
            )
            await self.store.beat(self.info, ALIVE_S)
            await asyncio.sleep(BEAT_S)

    async def lease(self) -> Lease | None:
        return await self.store.lease(self.info.id)

    async def die(self) -> None:
        """Act as if the process was killed and its heartbeat has expired."""
        await self.stop()
        await self.store.redis.delete(f"worker:{self.info.id}")

    async def stop(self) -> None:
        """It beats no more; its last heartbeat stands."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class Workers:
    """The workers of one test, by id; the id's first part is the pool."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._all: dict[str, FakeWorker] = {}

    async def start(self, *ids: str, gpus: Sequence[Gpu] = (), max_ranks: int = 0) -> None:
        for id in ids:
            worker = self._all.setdefault(id, FakeWorker(self.store, id, Pool(id.split("-")[0])))
            worker.info = msgspec.structs.replace(worker.info, gpus=list(gpus), max_ranks=max_ranks)
            await worker.stop()
            await worker.start()

    def __getitem__(self, id: str) -> FakeWorker:
        return self._all[id]

    async def holds(self, id: str) -> str | None:
        lease = await self[id].lease()
        return None if lease is None else lease.job

    async def idle(self, *ids: str) -> bool:
        found = {worker.id: worker for worker in await self.store.workers()}
        return all(id in found and found[id].job is None for id in ids)

    async def stop(self) -> None:
        for worker in self._all.values():
            await worker.die()


async def new_job(store: Store, id: str = "", state: JobState = JobState.QUEUED, **changes: Any) -> str:
    """A stored job; `changes` as in `make_spec`, and its tenant."""
    tenant, id = changes.pop("tenant", "default"), id or f"j-{uuid.uuid4().hex[:10]}"
    await store.create_job(id=id, spec=make_spec(**changes).model_dump(mode="json"), tenant=tenant)
    if state != JobState.QUEUED:
        await store.transition(id, state, epoch=1)
    return id


async def archive(archiver: Archiver) -> None:
    """A round of the archiver."""
    await archiver.scan()
    await archiver.put()


async def messages(bus: Bus, subject: Subject[T], **keys: str) -> list[T]:
    """A list to which every message of the subject is added from now on."""
    found: list[T] = []

    async def hear(message: T) -> None:
        found.append(message)

    await bus.listen(subject, hear, **keys)
    await bus.flush()
    return found


async def kinds(store: Store, job: str) -> list[str]:
    """The job's events, oldest first."""
    return [event["event"] for event in await store.events(job)]


@asynccontextmanager
async def running(coroutine: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """A task for the length of a block."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def scheduler_process(
    nats: Server, valkey: Server, port: int, data_dir: Path, log: Path | None = None
) -> subprocess.Popen[bytes]:
    """A scheduler as it is run, which logs to this file."""
    environ = {
        **os.environ,
        "OPENTINKER_NATS_URL": nats.url,
        "OPENTINKER_REDIS_URL": valkey.url,
        "OPENTINKER_HTTP_PORT": str(port),
        "OPENTINKER_DATA_DIR": str(data_dir),
        "OPENTINKER_LOG_LEVEL": "debug",
    }
    with (log or Path(os.devnull)).open("wb") as out:
        argv = [sys.executable, "-m", "opentinker.services.scheduler"]
        return subprocess.Popen(argv, env=environ, stdout=out, stderr=out if log else None)
