"""Jobs of kind `tinker`: draws the samples that clients of the Tinker API ask for, with the base or with an adapter.

claim loop    consumes SAMPLE; waits for free places, or for a tenant of which no request is here; woken by the
              standing pull
sample task   waits for its tenant's turn, loads the adapter that is named, draws the samples side by side, keeps the
              answer in Redis, produces ANSWERED, then acks the request
report loop   produces METRIC once a second
timeline      produces TIMELINE once a second
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count

import structlog
from redis.exceptions import ResponseError

from opentinker.services.rollout_worker.engines.base import Completion, Engine, EngineError, EngineLost
from opentinker.services.rollout_worker.tinker.adapter_cache import AdapterCache
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused
from opentinker.services.rollout_worker.tinker.samples import problem_of, prompt_of, sampled_of, sampling_of
from opentinker.services.rollout_worker.tinker.turns import Turns
from opentinker.shared.asyncio_tools import (
    cancel_and_wait,
    forward_exception,
    gather_all,
    sleep,
    wait_event,
)
from opentinker.shared.messaging.bus import Consumer, Delivery
from opentinker.shared.messaging.subjects import ANSWERED, SAMPLE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.runtime.telemetry import Meters, Reporter
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.tinker import TinkerStore
from opentinker.shared.types.core import Lease
from opentinker.shared.types.tinker import Answer, Answered, Failed, Sampled, SampleRequest

log = structlog.get_logger()

REPORT_S = 1.0
MAX_DELIVERIES = 5
"""A request delivered once more is answered with an error: one that kills the engine at every try must come to an
end. Requests that were in flight with it count too."""
LOOK_S = 0.05
"""A worker without a free place looks so often for tenants of which it has no request."""
BURST = 64
"""Requests that are taken at a time to find those of such a tenant."""
MAX_HELD, MAX_HELD_BYTES = 4096, 128 * 2**20
"""Requests that a worker holds, and bytes of their messages. Only where several tenants wait are there more than its
places take: others stay in the stream, for other workers."""


@dataclass
class Undrawn:
    samples: int
    """Samples of a begun request that are not drawn yet."""


class TinkerJob:
    """One lease's work. `engine` is started, serves the base, and has room for the adapters."""

    def __init__(
        self, worker: LeasedWorker, lease: Lease, spec: JobSpec, engine: Engine, ack_wait_s: float = 6.0
    ) -> None:
        """`ack_wait_s`: a request whose holder sends no progress for this time goes to another worker; holders send it
        every third of it."""
        self.worker, self.lease, self.spec, self.engine, self.ack_wait_s = worker, lease, spec, engine, ack_wait_s
        self.bus = worker.ctx.bus
        self.store = TinkerStore(worker.ctx.store.redis)
        self.adapters = AdapterCache(engine, spec.tinker.max_adapters, spec.tinker.max_rank)
        self.turns = Turns(spec.tinker.max_concurrent)
        self.running = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.waiting: set[asyncio.Task[None]] = set()
        """Those of them that wait for their turn."""
        self.held_bytes = 0
        self.current: set[str] = set()
        """Ids of the requests that are being carried out."""
        self.place = asyncio.Event()
        self.numbers = count(1)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Exception of a sample task: a failure of this service, not of a request."""
        self.quiet_since = time.monotonic()
        self.meters = Meters()
        self.meter = self.meters.of(lease.job)
        self.reporter = Reporter(self.bus, worker.info.id, self.meters)
        self.lanes = Lanes(self.bus, lease.job, worker.info.id)

    async def run(self) -> None:
        """Serve until the lease ends or is taken back, or the service stops. Requests in progress are then answered;
        those that are cut off go to another worker."""
        async with AsyncExitStack() as held:
            held.callback(self.worker.tell, {})
            held.push_async_callback(self._end_reports)
            held.push_async_callback(self.lanes.report)
            requests = await self.bus.consume(
                SAMPLE,
                f"sample-{self.lease.job}",
                batch=BURST,
                ack_wait_s=self.ack_wait_s,
                job=self.lease.job,
            )
            held.push_async_callback(requests.close)
            held.push_async_callback(self._end_tasks)
            self._tell()
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            await first_failure(
                {
                    "claim": self._claim_loop(requests),
                    "report": self._report_loop(),
                    "timeline": self.lanes.run(),
                    "broken": asyncio.wait_for(self.broken, None),
                    "engine": self.engine.watch(),
                }
            )
            await cancel_and_wait(*self.waiting)
            if self.tasks:
                log.info("draining", requests=len(self.tasks))
                await asyncio.wait(self.tasks)

    async def _end_tasks(self) -> None:
        await cancel_and_wait(*self.tasks)

    async def _end_reports(self) -> None:
        """Send the last report with what came since the previous one; afterwards no gauge is shown."""
        self.meter.gauges.clear()
        await self.reporter.report()
        self.meters.jobs.clear()
        await self.reporter.report()

    # --- requests -----------------------------------------------------------------------------------------------

    async def _claim_loop(self, requests: Consumer[SampleRequest]) -> None:
        """Consumes SAMPLE, starts sample tasks. Returns when the service is stopping or the worker is taken back."""
        while not self.worker.ending:
            limit = 1  # a request may fill all places: none is taken before there is one
            if self.turns.is_full and not requests.ready:
                if not (missed := await self._misses_tenants()):
                    self.place.clear()
                    await wait_event(self.place, LOOK_S)
                if not missed or self.worker.ending or not self.turns.is_full:
                    continue
                limit = BURST
            delivery = await requests.next(LOOK_S if self.turns.is_full else 0.5, limit=limit)
            if delivery is None:
                continue
            task = asyncio.create_task(self._run(delivery))
            self.tasks.add(task)
            task.add_done_callback(self._done)
            await asyncio.sleep(0)  # the task takes its turn

    async def _misses_tenants(self) -> bool:
        """Return whether a tenant waits of which there is no request here, and there is room for more: its requests
        may be behind those of others in the stream."""
        if len(self.tasks) >= MAX_HELD or self.held_bytes >= MAX_HELD_BYTES:
            return False
        return not await self.store.drawing(self.lease.job) <= self.turns.tenants

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.quiet_since = time.monotonic()
        forward_exception(task, self.broken)

    async def _run(self, delivery: Delivery[SampleRequest]) -> None:
        """One request to its end: its answer is kept; then the request is acked."""
        request = delivery.noun
        id = delivery.key if request is None else request.request
        if id in self.current:  # a copy: a report of progress came late. The first one is acked in the end
            return
        self.current.add(id)
        self.held_bytes += delivery.size
        self.meter.counts["serving/requests"] += 1
        try:
            with structlog.contextvars.bound_contextvars(request=id):
                async with delivery.held(self.ack_wait_s), self._turn(request) as undrawn:
                    if await self.store.answered(id) is not None:
                        return
                    if request is None:
                        log.error("bad_request", error=delivery.error)
                        result: Sampled | Failed = _fault("it cannot be read by this release of the server")
                    elif delivery.deliveries > MAX_DELIVERIES:
                        result = _fault(f"{MAX_DELIVERIES} tries came to no end, because workers were lost")
                    else:
                        result = await self._result(request, undrawn)
                    await self._keep(id, result)
        finally:
            self.current.discard(id)
            self.held_bytes -= delivery.size

    @asynccontextmanager
    async def _turn(self, request: SampleRequest | None) -> AsyncIterator[Undrawn]:
        """Wait for the turn of the request's tenant. Samples that were not drawn leave in the end."""
        tenant, samples = ("", 1) if request is None else (request.tenant, max(1, request.count))
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            await self.turns.enter(tenant, samples)
        finally:
            self.waiting.discard(task)
        undrawn = Undrawn(samples)
        try:
            yield undrawn
        finally:
            self.turns.leave(tenant, undrawn.samples)
            self.place.set()

    async def _keep(self, id: str, result: Sampled | Failed) -> None:
        if isinstance(result, Failed):
            self.meter.counts["serving/refused"] += 1
            log.info("sample_failed", category=result.category, error=result.error)
        else:
            self.meter.counts["serving/answers"] += 1
        try:
            await self.store.answer(Answer(request=id, result=result))
        except ResponseError as error:
            log.exception("answer_not_kept")
            result = _fault(f"Redis does not take the answer ({error}); ask for fewer samples at a time")
            await self.store.answer(Answer(request=id, result=result))
        await self.bus.emit(ANSWERED, Answered(request=id), job=self.lease.job)

    async def _result(self, request: SampleRequest, undrawn: Undrawn) -> Sampled | Failed:
        """Raises EngineLost."""
        try:
            return await self._sample(request, undrawn)
        except EngineLost:
            raise
        except AdapterGone as error:
            return Failed(error=f"{error}: make a sampler from newer weights", lost=request.follows)
        except AdapterRefused as error:
            return Failed(error=str(error))
        except EngineError as error:
            return Failed(error=str(error), category="server")
        except Exception as error:  # one failing request must not end the others
            log.exception("request_failed")
            return _fault(f"a fault of the server ({type(error).__name__}), which its log describes")

    async def _sample(self, request: SampleRequest, undrawn: Undrawn) -> Sampled | Failed:
        prompt = prompt_of(request)
        problem = problem_of(
            request,
            prompt,
            context_length=self.engine.context_length,
            vocab_size=self.engine.vocab_size,
            simulated=self.spec.rollout.engine == "toy",
        )
        if problem:
            return Failed(error=problem)
        async with self.adapters.holding(request.directory, request.version) as adapter:
            drawn = [self._draw(request, prompt, index, adapter, undrawn) for index in range(request.count)]
            completions = await gather_all(drawn)
        self.meter.counts["serving/prompt_tokens"] += len(prompt)
        return await asyncio.to_thread(sampled_of, request, completions)

    async def _draw(
        self, request: SampleRequest, prompt: list[int], index: int, adapter: str, undrawn: Undrawn
    ) -> Completion:
        sampling = sampling_of(request, index, self.engine.context_length - len(prompt), adapter)
        async with self.turns.place(request.tenant):
            self.running += 1
            try:
                with self.lanes.busy("generation", kind="rollout"):
                    completion = await self.engine.generate(f"tinker-{next(self.numbers)}", prompt, sampling)
            finally:
                self.running -= 1
        undrawn.samples -= 1
        self.turns.leave(request.tenant)
        self.place.set()
        self.meter.counts["serving/tokens"] += len(completion.ids)
        self.worker.spent["tokens_generated"] += len(completion.ids)
        return completion

    # --- loops --------------------------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        """Produces METRIC. Returns never."""
        while True:
            await sleep(REPORT_S)
            self._tell()
            self.meter.gauges["serving/running"] = self.running
            self.meter.gauges["serving/waiting"] = max(0, self.turns.open - self.running) + len(self.waiting)
            self.meter.gauges["serving/adapters"] = len(self.adapters)
            self.meter.counts["serving/adapters_loaded"] = self.adapters.loads
            await self.reporter.report()

    def _tell(self) -> None:
        quiet_s = 0.0 if self.tasks else time.monotonic() - self.quiet_since
        self.worker.tell({"requests": len(self.tasks), "quiet_s": round(quiet_s, 1)})


def _fault(why: str) -> Failed:
    return Failed(error=f"no samples were drawn: {why}; send the request again", category="server")
