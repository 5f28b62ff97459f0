"""A trainer process whose jobs share a base, in this process: the end of its bank, and what its jobs do then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.shared_service import serve_shared
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, Pool
from tests.conftest import WAIT_S, until
from tests.samples.row_samples import chat_model, copies, row_spec, write_rows

Serve = Callable[[], tuple[Context, asyncio.Task[None]]]
SETTINGS: dict[str, Any] = {"bank_jobs": 1, "bank_tokens": 512, "heartbeat_s": 0.1}
STEPS = 6


@pytest.fixture
def serve(bus: Bus, store: Store, tmp_path: Path) -> Serve:
    def start() -> tuple[Context, asyncio.Task[None]]:
        settings = Settings(data_dir=tmp_path / "data", **SETTINGS)
        log = structlog.get_logger()
        ctx = Context(service="trainer", worker="shared", settings=settings, bus=bus, store=store, log=log)
        return ctx, asyncio.create_task(serve_shared(ctx))

    return start


async def grant(ctx: Context, job: str, epoch: int) -> None:
    (worker,) = await until(ctx.store.workers)
    await ctx.store.grant(
        Lease(job=job, worker=worker.id, epoch=epoch, incarnation=worker.incarnation, pool=Pool.TRAINER)
    )
    await ctx.bus.emit(WAKE, {}, who=worker.id)


async def test_a_bank_that_crashes_ends_the_process_and_its_job_resumes(
    serve: Serve, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, rows = chat_model(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl", copies(16))
    train = {"steps": STEPS, "lr": 1e-3, "checkpoint_every": 1}
    spec = row_spec(base, rows, model={"lora": {"rank": 4}}, train=train, resources={"trainer": "shared"})
    await store.create_job(id="j", spec=spec.model_dump(mode="json"), tenant="t")
    await store.transition("j", JobState.STARTING)
    passes, run_pass = list[int](), BankLoop._run_pass

    async def crash(loop: BankLoop) -> None:
        passes.append(1)
        if len(passes) > 2:
            raise LookupError("in the queue")
        await run_pass(loop)

    with monkeypatch.context() as context:
        context.setattr(BankLoop, "_run_pass", crash)
        ctx, serving = serve()
        await grant(ctx, "j", 1)
        with pytest.raises(LookupError, match="in the queue"):
            await asyncio.wait_for(serving, WAIT_S)
    (spent,) = await UsageStore(store.redis).of_jobs(["j"])
    assert spent["cpu_s"] > 0
    assert not await store.workers()
    saved = checkpoint.list_checkpoints(tmp_path / "data" / "jobs" / "j" / "checkpoints")
    assert 0 < saved[-1][1].step < STEPS
    await store.revoke("shared.0")
    ctx, serving = serve()
    await grant(ctx, "j", 2)

    async def state() -> JobState:
        return (await store.job("j")).state

    await until(state, lambda found: found == JobState.SUCCEEDED)
    ctx.stopping.set()
    await asyncio.wait_for(serving, WAIT_S)
    (spent,) = await UsageStore(store.redis).of_jobs(["j"])
    assert spent["cpu_s"] > 0
