"""A Tinker server in a trainer process whose jobs share a base."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import structlog

from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.shared_service import serve_shared
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, Pool
from tests.conftest import WAIT_S, until
from tests.integration.trainer.tinker.conftest import JOB, STEP, Client, Server, forward_backward


async def test_a_tinker_server_has_a_place_in_a_shared_trainer(
    bus: Bus, store: Store, base: BaseModel, tmp_path: Path
) -> None:
    await bus.js.delete_stream("COMMANDS")
    await bus.ensure_streams()
    server = Server(bus, store, base, tmp_path / "data")
    await server.create()
    await store.transition(JOB, JobState.STARTING)
    settings = Settings(data_dir=server.data_dir, bank_jobs=2, bank_tokens=64, heartbeat_s=0.1)
    ctx = Context(
        service="trainer", worker="shared", settings=settings, bus=bus, store=store, log=structlog.get_logger()
    )
    serving = asyncio.create_task(serve_shared(ctx))
    workers = await until(store.workers, lambda found: len(found) == 2)

    async def grant(epoch: int) -> None:
        worker = workers[epoch - 1]
        lease = Lease(job=JOB, worker=worker.id, epoch=epoch, incarnation=worker.incarnation, pool=Pool.TRAINER)
        await store.transition(JOB, JobState.STARTING, epoch=epoch)
        await store.grant(lease)
        await bus.emit(WAKE, {}, who=worker.id)

    client = Client(server, "s:train:0")
    await grant(1)
    await client.create()
    assert (await client.call(forward_backward(0))).metrics["loss:sum"] > 0
    assert (await client.call(STEP)).metrics["steps"] == 1.0

    async def state() -> JobState:
        return (await store.job(JOB)).state

    await until(state, lambda found: found == JobState.RUNNING)
    await store.revoke(workers[0].id)  # the same process, but another of its workers, has the next lease
    await grant(2)
    assert (await client.call(STEP)).metrics["steps"] == 2.0
    await store.transition(JOB, JobState.CANCELLED)
    await store.revoke(workers[1].id)
    idle = await until(store.workers, lambda found: all(one.status == "idle" and not one.job for one in found))
    assert len(idle) == 2 and not serving.done()
    spent = partial(UsageStore(store.redis).of_jobs, [JOB])  # a lease is counted when it has come to its end
    await until(spent, lambda found: found[0]["tokens_trained"] > 0 and found[0]["cpu_s"] > 0)
    ctx.stopping.set()
    await asyncio.wait_for(serving, WAIT_S)
