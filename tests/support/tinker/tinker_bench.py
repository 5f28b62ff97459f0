"""A job of kind `tinker` and the lives of rollout workers that draw its samples, with a simulated engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import structlog

from opentinker.services.rollout_worker.engines.base import Completion, EngineLost
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.tinker.tinker_job import TinkerJob
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ANSWERED, SAMPLE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ToySpec, parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.requests import Quota
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import Lease, Pool, WeightVersion
from opentinker.shared.types.tinker import Answered, Failed, Sampled, SampleParams, SampleRequest
from tests.conftest import until
from tests.support.factories import not_called

PROMPT = [5, 6, 7]
EOS = 1


class Gated(ToyEngine):
    """Waits at `gate`; `poison` is a prompt that kills it."""

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__(ToySpec(skill=0.0), eos_id=EOS, vocab_size=128, context_length=64)
        self.version = WeightVersion(0, 0)
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.poison: list[int] = []
        self.inside = self.most = self.asked = 0
        self.adapters: set[str] = set()

    async def generate(self, request: str, prompt_ids: list[int], sampling: Any, *rest: Any) -> Completion:
        self.asked += 1
        if prompt_ids == self.poison:
            raise EngineLost("killed by its request")
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.adapters.add(sampling.adapter)
        try:
            await self.gate.wait()
            return await super().generate(request, prompt_ids, sampling, *rest)
        finally:
            self.inside -= 1


class Bench:
    """A job and the lives of rollout workers that serve it."""

    def __init__(self, bus: Bus, store: Store) -> None:
        self.bus, self.store = bus, store
        self.job = f"j-{uuid.uuid4().hex[:8]}"
        self.answers = TinkerStore(store.redis)
        self.announced: set[str] = set()
        self.ack_wait_s = 6.0
        self.settings: dict[str, Any] = {"max_adapters": 2, "max_rank": 8, "max_concurrent": 16}

    async def ask(self, id: str, prompt: list[int] = PROMPT, **fields: Any) -> str:
        params = fields.pop("params", SampleParams(max_tokens=4, seed=1))
        ids, tenant = np.asarray(prompt, "<i4").tobytes(), fields.pop("tenant", "t")
        request = SampleRequest(request=f"{self.job}#{id}", tenant=tenant, prompt=ids, params=params, **fields)
        await self.answers.ask_sample(request.request, "digest", Quota(job=self.job, tenant=tenant, minute=0))
        await self.bus.publish(SAMPLE, request, request.request, job=self.job, tenant=tenant)
        return request.request

    async def answer(self, request: str) -> Sampled | Failed:
        found = await until(lambda: self.answers.answered(request))
        assert found is not None and isinstance(found.result, Sampled | Failed)
        return found.result

    async def sampled(self, request: str) -> Sampled:
        result = await self.answer(request)
        assert isinstance(result, Sampled), result
        return result

    async def failed(self, request: str) -> Failed:
        result = await self.answer(request)
        assert isinstance(result, Failed), result
        return result

    async def waiting(self) -> int:
        return await self.bus.count("SAMPLES", SAMPLE.at(job=self.job, tenant="*"))

    def work(self, engine: Gated, name: str = "rollout-0") -> TinkerJob:
        spec = parse_spec(
            {
                "name": "server",
                "kind": "tinker",
                "model": {"base": "somewhere"},
                "rollout": {"engine": "toy"},
                "tinker": self.settings,
            }
        )
        log = structlog.get_logger()
        ctx = Context("rollout-worker", name, Settings(), self.bus, self.store, log)
        worker = LeasedWorker(ctx, Pool.ROLLOUT, not_called)
        lease = Lease(job=self.job, worker=name, incarnation=worker.info.incarnation, epoch=1, pool=Pool.ROLLOUT)
        return TinkerJob(worker, lease, spec, engine, ack_wait_s=self.ack_wait_s)

    @asynccontextmanager
    async def serving(self, engine: Gated) -> AsyncIterator[TinkerJob]:
        job = self.work(engine)
        life = asyncio.create_task(job.run())
        try:
            yield job
        finally:
            await cancel_and_wait(life)
        assert life.cancelled(), "it lived to the end of the block"


class OneByOne(Gated):
    """Draws a sample of the prompt [9] for each permit, and others at once."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def generate(self, request: str, prompt_ids: list[int], sampling: Any, *rest: Any) -> Completion:
        if prompt_ids == [9]:
            self.inside += 1
            await self.permits.acquire()
            self.inside -= 1
        return await super().generate(request, prompt_ids, sampling, *rest)


@asynccontextmanager
async def bench_of(bus: Bus, store: Store) -> AsyncIterator[Bench]:
    bench = Bench(bus, store)

    async def note(answered: Answered) -> None:
        bench.announced.add(answered.request)

    heard = await bus.listen(ANSWERED, note, job=bench.job)
    yield bench
    await heard.unsubscribe()
