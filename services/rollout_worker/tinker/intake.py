"""Takes requests for samples from the stream: of each tenant in the order of their coming, and of every tenant at least
one, so that none waits behind the requests of another.

discovery     consumes nothing; looks every LOOK_S for tenants that have requests in the stream, starts their loops
tenant loop   consumes SAMPLE of one tenant; waits until the tenant may begin another request; woken by the standing
              pull, and by samples that leave
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from opentinker.services.rollout_worker.tinker.turns import Turns
from opentinker.shared.asyncio_tools import cancel_and_wait, forward_exception, wait_event
from opentinker.shared.messaging.bus import Bus, Delivery
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import SAMPLE
from opentinker.shared.types.tinker import SampleRequest

LOOK_S = 0.1
"""Longest time until a worker sees the first request of a tenant."""
IDLE_S = 60.0
"""The loop of a tenant without requests ends after this time."""
STEP_S = 0.5

Start = Callable[[str, Delivery[SampleRequest]], None]
"""Starts a request of a tenant; it has entered `turns` when the call returns."""


class Intake:
    def __init__(
        self, bus: Bus, job: str, turns: Turns, ack_wait_s: float, start: Start, ended: Callable[[], bool]
    ) -> None:
        self._bus, self._job, self._turns, self._ack_wait_s = bus, job, turns, ack_wait_s
        self._start, self._ended = start, ended
        self.loops: dict[str, asyncio.Task[None]] = {}
        """By the tenant's token in the subject."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Start requests until `ended`. What was not started is given back."""
        stream, subject = required_stream(SAMPLE), SAMPLE.at(job=self._job, tenant="*")
        try:
            while not self._ended():
                for found in await self._bus.counts(stream, subject):
                    tenant = found.rpartition(".")[2]
                    if tenant not in self.loops:
                        self._begin(tenant)
                await asyncio.wait([self._broken], timeout=LOOK_S)
                if self._broken.done():
                    self._broken.result()
        finally:
            await cancel_and_wait(*self.loops.values())

    def _begin(self, tenant: str) -> None:
        task = self.loops[tenant] = asyncio.create_task(self._loop(tenant))

        def over(task: asyncio.Task[None]) -> None:
            del self.loops[tenant]
            forward_exception(task, self._broken)

        task.add_done_callback(over)

    async def _loop(self, tenant: str) -> None:
        """Consumes SAMPLE of a tenant. Returns when it has none for IDLE_S, or the worker takes no more."""
        requests = await self._bus.consume(
            SAMPLE, f"sample-{self._job}-{tenant}", batch=1, ack_wait_s=self._ack_wait_s, job=self._job, tenant=tenant
        )
        busy_at = time.monotonic()
        try:
            while not self._ended() and time.monotonic() - busy_at < IDLE_S:
                if self._turns.begun[tenant]:
                    busy_at = time.monotonic()
                if not self._turns.may_begin(tenant) and not requests.ready:
                    self._turns.left.clear()
                    await wait_event(self._turns.left, STEP_S)
                    continue
                delivery = await requests.next(STEP_S, limit=1)  # a request may fill all places: one at a time
                if delivery is not None:
                    self._start(tenant, delivery)
        finally:
            await requests.close()
