"""Jobs of kind `tinker`: draws the samples that clients of the Tinker API ask for, with the base, with an adapter, or
with a model of which all weights were trained.

intake        consumes SAMPLE (intake.py), starts sample tasks
sample task   loads the weights that are named, draws the samples side by side, each when it is its tenant's turn, keeps
              the answer in Redis, produces ANSWERED, then acks the request
report loop   produces METRIC once a second
timeline      produces TIMELINE once a second
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count

import structlog
from redis.exceptions import ResponseError

from opentinker.services.rollout_worker.engines.base import Completion, Engine, EngineError, EngineLost
from opentinker.services.rollout_worker.tinker.adapter_cache import AdapterCache
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused
from opentinker.services.rollout_worker.tinker.full_models import FullModels
from opentinker.services.rollout_worker.tinker.intake import Intake
from opentinker.services.rollout_worker.tinker.samples import problem_of, prompt_of, sampled_of, sampling_of
from opentinker.services.rollout_worker.tinker.shared_lock import SharedLock
from opentinker.services.rollout_worker.tinker.turns import Turns
from opentinker.shared.asyncio_tools import cancel_and_wait, forward_exception, gather_all, sleep
from opentinker.shared.messaging.bus import Delivery
from opentinker.shared.messaging.subjects import ANSWERED
from opentinker.shared.runtime.job_logs import outside_job_log
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.runtime.telemetry import Meters, Reporter
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.tinker.billing import TinkerSpent
from opentinker.shared.state.tinker.requests import Losses
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import Lease
from opentinker.shared.types.tinker import Answer, Answered, Failed, Sampled, SampleRequest

log = structlog.get_logger()

REPORT_S = 1.0
SUSPECT_LOSSES = 5
"""A request that was in progress on this many lost workers is sampled alone from then on."""
MAX_LOSSES_ALONE = 3
"""A request that this many workers were lost with while sampling it alone gets an error: it is what kills them."""

CRASHES = (
    "no samples were drawn: {} workers crashed or were killed during this request, the last {} while they drew nothing "
    "else. If machines were stopped, send it again; if not, the request may be too large for them: ask for fewer "
    "samples at a time, a lower max_tokens, or a shorter prompt"
)


@dataclass
class Undrawn:
    """Samples of a request that has begun."""

    tenant: str
    samples: int


class TinkerJob:
    """One lease's work. `engine` is started, serves the base, and has room for the adapters."""

    def __init__(
        self, worker: LeasedWorker, lease: Lease, spec: JobSpec, engine: Engine, ack_wait_s: float = 6.0
    ) -> None:
        """`ack_wait_s`: a request whose holder sends no progress for this time goes to another worker; holders send it
        every third of it."""
        self.worker, self.lease, self.spec, self.engine, self.ack_wait_s = worker, lease, spec, engine, ack_wait_s
        self.bus = worker.ctx.bus
        self.store, self.spent = TinkerStore(worker.ctx.store.redis), TinkerSpent(worker.ctx.store.redis)
        self.adapters: AdapterCache | FullModels
        if spec.tinker.full_weights:
            self.adapters = FullModels(engine, spec.model.base)
        else:
            self.adapters = AdapterCache(engine, spec.tinker.max_adapters, spec.tinker.max_rank)
        self.turns = Turns(spec.tinker.max_concurrent)
        self.intake = Intake(self.bus, lease.job, self.turns, ack_wait_s, self._start, lambda: worker.ending)
        self.running = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.current: set[str] = set()
        """Ids of the requests that are being carried out."""
        self.lock = SharedLock()
        self.is_lost = False
        """This worker has failed: what is cut off was perhaps the cause."""
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
            held.push_async_callback(self._end_tasks)
            self._tell()
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            tasks = {
                "intake": self.intake.run(),
                "report": self._report_loop(),
                "timeline": self.lanes.run(),
                "broken": asyncio.wait_for(self.broken, None),
                "engine": self.engine.watch(),
            }
            try:
                await first_failure(tasks)
            except Exception:
                self.is_lost = True
                raise
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

    def _start(self, tenant: str, delivery: Delivery[SampleRequest]) -> None:
        undrawn = Undrawn(tenant, 1 if delivery.noun is None else max(1, delivery.noun.count))
        self.turns.enter(tenant, undrawn.samples)
        task = asyncio.create_task(self._run(delivery, undrawn))
        self.tasks.add(task)
        task.add_done_callback(partial(self._done, undrawn))

    def _done(self, undrawn: Undrawn, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.turns.leave(undrawn.tenant, undrawn.samples)
        self.quiet_since = time.monotonic()
        forward_exception(task, self.broken)

    async def _run(self, delivery: Delivery[SampleRequest], undrawn: Undrawn) -> None:
        """One request to its end: its answer is kept; then the request is acked."""
        request = delivery.noun
        id = delivery.key.partition("@")[0] if request is None else request.request
        if id in self.current:  # a copy: a report of progress came late. The first one is acked in the end
            return
        self.current.add(id)
        self.meter.counts["serving/requests"] += 1
        try:
            with self._log_of(request), structlog.contextvars.bound_contextvars(request=id):
                async with delivery.held(self.ack_wait_s):
                    if await self.store.answered(id) is not None:  # given up, or drawn elsewhere
                        await self.store.drop_sample(id)
                        return
                    if request is None:
                        log.error("bad_request", error=delivery.error)
                        result: Sampled | Failed = _fault("it cannot be read by this release of the server")
                    else:
                        result = await self._try(request, undrawn, is_first=delivery.deliveries == 1)
                    await self._keep(id, result, request)
        finally:
            self.current.discard(id)

    def _log_of(self, request: SampleRequest | None) -> AbstractContextManager[None]:
        """Lines about a request go to the job's log if it is one of the job's tenant, who reads that log."""
        is_own = request is not None and request.tenant == self.worker.tenant
        return nullcontext() if is_own else outside_job_log()

    async def _keep(self, id: str, result: Sampled | Failed, request: SampleRequest | None) -> None:
        """Keep the answer unless there is one, count its tokens, and tell who waits for it."""
        if isinstance(result, Failed):
            self.meter.counts["serving/refused"] += 1
            log.info("sample_failed", category=result.category, error=result.error)
        else:
            self.meter.counts["serving/answers"] += 1
        try:
            is_kept = await self.store.answer(Answer(request=id, result=result))
        except ResponseError as error:
            log.exception("answer_not_kept")
            result = _fault(f"Redis does not take the answer ({error}); ask for fewer samples at a time")
            is_kept = await self.store.answer(Answer(request=id, result=result))
        await self.bus.emit(ANSWERED, Answered(request=id), job=self.lease.job)
        if is_kept and request is not None and isinstance(result, Sampled):
            drawn = sum(len(one.tokens) // 4 for one in result.sequences)
            counts = {"sampling_prefill": len(request.prompt) // 4, "sampling_sample": drawn}
            await self.spent.add(request.tenant, id.partition(":")[0], self.spec.model.base, counts)

    async def _try(self, request: SampleRequest, undrawn: Undrawn, *, is_first: bool) -> Sampled | Failed:
        """Sample, together with other requests unless this one is a suspect. Raises EngineLost."""
        lost = Losses() if is_first else await self.store.losses(request.request)
        if lost.alone >= MAX_LOSSES_ALONE:
            return Failed(error=CRASHES.format(lost.beside + lost.alone, lost.alone), category="server")
        alone = lost.beside >= SUSPECT_LOSSES
        if alone:
            log.warning("drawn_alone", losses=lost.beside, alone=lost.alone)
        async with self.lock.exclusive() if alone else self.lock.shared():
            await self.store.begin_draw(request.request, alone=alone)
            try:
                return await self._result(request, undrawn)
            except asyncio.CancelledError:
                if not self.is_lost:  # it is handed back in good order
                    await self.store.hand_back(request.request, alone=alone)
                raise

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
        async with self._holding(request, undrawn.tenant) as adapter:
            drawn = [self._draw(request, prompt, index, adapter, undrawn) for index in range(request.count)]
            completions = await gather_all(drawn)
        self.meter.counts["serving/prompt_tokens"] += len(prompt)
        return await asyncio.to_thread(sampled_of, request, completions)

    def _holding(self, request: SampleRequest, tenant: str) -> AbstractAsyncContextManager[str]:
        if isinstance(self.adapters, FullModels):
            return self.adapters.holding(request.directory, request.version)
        return self.adapters.holding(tenant, request.directory, request.version)

    async def _draw(
        self, request: SampleRequest, prompt: list[int], index: int, adapter: str, undrawn: Undrawn
    ) -> Completion:
        sampling = sampling_of(request, index, self.engine.context_length - len(prompt), adapter)
        async with self.turns.place(undrawn.tenant):
            self.running += 1
            try:
                with self.lanes.busy("generation", kind="rollout"):
                    completion = await self.engine.generate(f"tinker-{next(self.numbers)}", prompt, sampling)
            finally:
                self.running -= 1
        undrawn.samples -= 1
        self.turns.leave(undrawn.tenant)
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
            self.meter.gauges["serving/waiting"] = max(0, self.turns.open - self.running)
            if isinstance(self.adapters, AdapterCache):
                self.meter.gauges["serving/adapters"] = len(self.adapters)
                self.meter.counts["serving/adapters_loaded"] = self.adapters.loads
            else:
                self.meter.counts["serving/models_loaded"] = self.adapters.loads
            await self.reporter.report()

    def _tell(self) -> None:
        quiet_s = 0.0 if self.tasks else time.monotonic() - self.quiet_since
        self.worker.tell({"requests": len(self.tasks), "quiet_s": round(quiet_s, 1)})


def _fault(why: str) -> Failed:
    return Failed(error=f"no samples were drawn: {why}; send the request again", category="server")
