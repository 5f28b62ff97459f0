"""A rollout worker's job in this process, its tickets, and engines that fail."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import structlog

from opentinker.services.rollout_worker.engines.base import Completion, EngineError, EngineLost
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.episode_protocol import Sessions
from opentinker.services.rollout_worker.rl_job import RolloutJob
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import TICKET
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ToySpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Message, Pool, WeightVersion
from opentinker.shared.types.env_protocol import SessionReply, StepSession
from tests.conftest import until
from tests.support.factories import make_spec, make_ticket, not_called
from tests.support.scheduling import running
from tests.unit.rollout_worker.scripted_episode import renderer

EOS = 1


class Asking:
    """An environment side that asks once and is content with every answer."""

    async def open(self, *_: Any) -> SessionReply:
        return SessionReply(worker="env-0", messages=[Message(role="user", content="7=")])

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        return SessionReply(worker="env-0", reward=1.0, done=True)

    async def close(self, **_: Any) -> None:
        pass


class Mortal(ToyEngine):
    """Dies of every request while `poisoned`, or by itself when told to."""

    def __init__(self) -> None:
        super().__init__(ToySpec(), eos_id=EOS, vocab_size=128, context_length=64)
        self.version = WeightVersion(1, 0)
        self.poisoned = False
        self.died = asyncio.Event()

    async def generate(self, *args: Any, **options: Any) -> Completion:
        if self.poisoned:
            raise EngineLost("killed by its request")
        return await super().generate(*args, **options)

    async def watch(self) -> None:
        await self.died.wait()
        raise EngineLost("killed while idle")


class Failing(Mortal):
    """Cannot generate anything."""

    async def generate(self, *_: Any, **__: Any) -> Completion:
        raise EngineError("out of luck")


class Bench:
    """One job and the lives of a rollout worker that serves it."""

    def __init__(self, bus: Bus, store: Store) -> None:
        self.bus, self.store = bus, store
        self.job = f"j-{uuid.uuid4().hex[:8]}"
        self.spec = make_spec(rollout__max_concurrent_groups=32, rollout__engine="toy")
        self.admission = Admission(store.redis, self.job, epoch=1)
        self.sessions: Sessions = Asking()
        self.ack_wait_s = 0.5

    async def issue(self, groups: int) -> None:
        await self.store.create_job(id=self.job, spec=self.spec.model_dump(mode="json"), tenant="t")
        await self.store.transition(self.job, JobState.RUNNING)
        await self.admission.restore(step=0, max_staleness=0, groups_per_batch=groups, total=groups, discarded={})
        for seq in (await self.admission.issue(groups))[1]:
            ticket = make_ticket(job=self.job, seq=seq, group_size=self.spec.algorithm.group_size)
            await self.bus.publish(TICKET, ticket, f"{self.job}/{seq}", job=self.job)

    async def tickets(self) -> int:
        return await self.bus.count("TICKETS", TICKET.at(job=self.job))

    def live(self, engine: Mortal) -> asyncio.Task[None]:
        """A new process: claims tickets until it is cancelled or fails."""
        return asyncio.create_task(self.job_of([LoadedPolicy("", self.spec, engine, renderer())]).run())

    async def play(self, engine: Mortal) -> None:
        """Live until no ticket is left."""
        async with running(self.job_of([LoadedPolicy("", self.spec, engine, renderer())]).run()):
            await until(self.tickets, lambda found: found == 0)

    def job_of(self, policies: list[LoadedPolicy]) -> RolloutJob:
        log = structlog.get_logger()
        ctx = Context("rollout-worker", "rollout-0", Settings(), self.bus, self.store, log)
        worker = LeasedWorker(ctx, Pool.ROLLOUT, not_called)
        lease = Lease(job=self.job, worker="rollout-0", incarnation=worker.info.incarnation, epoch=1, pool=Pool.ROLLOUT)
        job = RolloutJob(worker, lease, self.spec, policies, self.sessions, ack_wait_s=self.ack_wait_s)
        job.weights.set()
        return job
