"""A trainer of a Tinker server in this process, with a bank on the small model, and clients that command it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from torch import Tensor

from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import BankLimits
from opentinker.services.trainer.tinker.tinker_job import TinkerJob
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import COMMAND
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.tinker import (
    Command,
    Create,
    Datum,
    ForwardBackward,
    LoraShape,
    OptimStep,
    TinkerModel,
    TinkerSession,
    tinker_place,
)
from tests.conftest import WAIT_S, until

LIMITS = BankLimits(step_tokens=64, datum_tokens=32, command_tokens=256, waiting_tokens=256, rank=16)
JOB = "tinker-1"
LORA = LoraShape(rank=4, seed=3)


def i32(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def f32(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def some_data(seed: int, rows: int = 5) -> list[Datum]:
    rng, made = np.random.default_rng(seed), []
    for _ in range(rows):
        ids = rng.integers(3, 60, rng.integers(4, 16))
        weights = rng.uniform(0.5, 1.5, len(ids) - 1)
        made.append(Datum(tokens=i32(ids[:-1]), targets=i32(ids[1:]), weights=f32(weights)))
    return made


def forward_backward(seed: int, **options: Any) -> ForwardBackward:
    return ForwardBackward(data=some_data(seed), loss="cross_entropy", **options)


STEP = OptimStep(lr=1e-2, clip=1.0)


class Server:
    """A job of kind tinker, whose trainer is started, stopped and killed."""

    def __init__(self, bus: Bus, store: Store, base: BaseModel, data_dir: Path, *, full: bool = False) -> None:
        """`full`: its clients train all weights."""
        self.base, self.data_dir, self.records = base, data_dir, TinkerStore(store.redis)
        settings = Settings(data_dir=data_dir)
        self.ctx = Context(
            service="trainer", worker="shared.0", settings=settings, bus=bus, store=store, log=structlog.get_logger()
        )
        tinker = {"full_weights": True} if full else {"max_rank": 8}
        self.spec = parse_spec({"name": "t", "kind": "tinker", "model": {"base": base.name}, "tinker": tinker})
        self.epoch = 0
        self.bank: BankLoop
        self.job: TinkerJob
        self.running: asyncio.Task[None] | None = None

    async def create(self) -> None:
        await self.ctx.store.create_job(id=JOB, spec=self.spec.model_dump(mode="json"), tenant="owner")

    async def start(self) -> None:
        """Start the trainer of the next epoch."""
        self.epoch += 1
        await self.ctx.store.transition(JOB, JobState.STARTING, epoch=self.epoch)
        bank = AdapterBank(
            self.base, self.data_dir / f"bank-{self.epoch}", LIMITS, slots=1 if self.spec.tinker.full_weights else 3
        )
        self.bank = await BankLoop(bank).__aenter__()

        async def work(*_: object) -> None:
            raise AssertionError

        self.worker = LeasedWorker(self.ctx, Pool.TRAINER, work)
        lease = Lease(
            job=JOB, worker=self.ctx.worker, epoch=self.epoch, incarnation=self.worker.info.incarnation,
            pool=Pool.TRAINER,
        )  # fmt: skip
        self.job = TinkerJob(self.worker, lease, self.spec, self.bank)
        self.running = asyncio.create_task(self.job.run())

    async def stop(self) -> None:
        """End the lease as a service does that stops."""
        assert self.running is not None
        self.worker._leaving.set()
        running, self.running = self.running, None
        await asyncio.wait_for(running, WAIT_S)
        await self.bank.__aexit__()

    async def kill(self) -> None:
        """Leave everything as it is: nothing more is stored or answered."""
        if self.running is None:
            return

        async def leave() -> None:
            await self.job._intake.close()

        self.job._close = leave  # type: ignore[method-assign]
        runners = [runner for runner, _ in self.job._models.values()]
        waiting = [task for runner in runners for task in [*runner._tasks.values(), runner._storing]]
        running, self.running = self.running, None
        await cancel_and_wait(running, *(task for _, task in self.job._models.values()), *waiting, self.bank.task)
        await asyncio.to_thread(self.bank._thread.shutdown)  # the next trainer has the same base

    async def kill_at_random(self, requests: Sequence[str], kills: int, rng: np.random.Generator) -> None:
        """Kill it this many times, each time shortly after the answer of a random one of these requests."""
        for _ in range(kills):
            request = requests[int(rng.integers(0, len(requests)))]
            await until(partial(self.records.answered, request))
            await asyncio.sleep(float(rng.uniform(0.0, 0.05)))
            await self.kill()
            await self.start()

    def state(self, model: str) -> Path:
        return tinker_place(self.data_dir, model) / "state"

    async def adapter(self, model: str, name: str) -> Tensor:
        """Return a vector of the model's adapter as it is now."""
        runner = self.job._models[model][0]
        vector: Tensor = (await self.bank.read(runner._commands.tenant, runner._commands.adapter)).vectors[name]
        return vector


class Client:
    """Numbers its commands as the SDK does."""

    def __init__(self, server: Server, model: str, tenant: str = "acme") -> None:
        self.server, self.model, self.tenant, self.seq = server, model, tenant, 0

    async def create(self, lora: LoraShape = LORA, **options: Any) -> Any:
        record = TinkerModel(
            id=self.model, tenant=self.tenant, job=JOB, base=self.server.base.name, lora=lora, created=1.0
        )
        await self.server.records.open_session(
            TinkerSession(id=self.model.partition(":")[0], tenant=self.tenant, created=1.0)
        )
        await self.server.records.add_model(record)
        return await self.call(Create(lora=lora, **options))

    async def send(self, body: Any, seq: int | None = None, copy: str = "") -> str:
        """Returns the id of the answer."""
        if seq is None:
            seq, self.seq = self.seq, self.seq + 1
        request = f"{self.model}#{seq}"
        command = Command(request=request, model=self.model, tenant=self.tenant, seq=seq, body=body)
        await self.server.ctx.bus.publish(COMMAND, command, request + copy, job=JOB)
        return request

    async def result(self, request: str) -> Any:
        """A Result; `Any`, so that tests can look into it."""
        answer: Any = await until(lambda: self.server.records.answered(request))
        return answer.result

    async def call(self, body: Any) -> Any:
        return await self.result(await self.send(body))


@pytest.fixture(scope="module")
def base(small: Path) -> BaseModel:
    return BaseModel(str(small))


async def fresh_server(bus: Bus, store: Store, base: BaseModel, place: Path, *, full: bool = False) -> Server:
    """Return a running one. The streams have nothing of earlier ones, nor the ids that they would take for
    repetitions."""
    await store.redis.flushdb()
    for stream in ("COMMANDS", "METRICS"):
        await bus.js.delete_stream(stream)
    await bus.ensure_streams()
    server = Server(bus, store, base, place, full=full)
    await server.create()
    await server.start()
    return server


@pytest.fixture
async def server(bus: Bus, store: Store, base: BaseModel, tmp_path: Path) -> AsyncIterator[Server]:
    server = await fresh_server(bus, store, base, tmp_path / "data")
    yield server
    await server.kill()
