"""Reference-forward service: adds the outputs of frozen models to groups between rollout worker and trainer.

read      starts a reader for every job with groups in SCORE; polls twice a second
reader    consumes SCORE of one job (work queue shared by all instances) into the group queue; waits for capacity;
          woken by the pull
load      loads the model that groups have waited for longest, concurrently with scoring (`model_loader.py`); woken by
          arrivals
score     runs forward passes, groups of all jobs together; models take turns; woken by arrivals and loads
finish    produces GROUP, then acknowledges; woken by score
extend    extends the acknowledgement deadline of the groups in flight
heartbeat produces heartbeats
report    produces METRIC once a second, by job and for this process as a whole
timeline  produces TIMELINE once a second, by job

A message is acknowledged after its group is stored, so a dead instance's work is delivered to another. An error in a
job fails that job only; a job whose stream is full waits. Other jobs continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from opentinker.services.reference_forward.group_queue import PREFETCH, GroupQueue, QueuedGroup
from opentinker.services.reference_forward.model_cache import ModelCache
from opentinker.services.reference_forward.model_loader import MODEL_ERRORS, ModelLoader, describe_error
from opentinker.services.reference_forward.required_models import ModelKey, find_models
from opentinker.services.reference_forward.results import add_results
from opentinker.shared.asyncio_tools import Notifier, every, sleep, wait_event
from opentinker.shared.data.readable_paths import check_opened
from opentinker.shared.messaging.bus import ACK_WAIT_S, ConsumerDeleted, Delivery, StreamFull, TooLarge
from opentinker.shared.messaging.subjects import GROUP, SCORE, SCORES, Subject
from opentinker.shared.runtime.gpus import visible
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.runtime.telemetry import CLUSTER, Meters, Reporter
from opentinker.shared.runtime.timeline import REPORT_S, LanesByJob
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.spec import read_stored
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.errors import Conflict, JobFailed, NotFound, SpecError
from opentinker.shared.types.trajectories import Group

if TYPE_CHECKING:
    from opentinker.services.reference_forward.scorer import Scorer

UNDECODED_GROUP = Subject(GROUP.pattern, msgspec.Raw)
"""GROUP for bytes that cannot be decoded."""
POLL_S = 0.5
IDLE_S = 30.0
"""A reader ends when its job has been idle for this long."""


class ReferenceForward:
    """`make_scorer` is called in a thread when the first group arrives: it imports torch, which few jobs need.

    `ack_wait_s`: silence after which the messages of a dead instance are delivered to another. `full_pause_s`: pause of
    a job after its stream was full.
    """

    def __init__(
        self,
        ctx: Context,
        make_scorer: Callable[[], Scorer],
        ack_wait_s: float = ACK_WAIT_S,
        full_pause_s: float = 2.0,
    ) -> None:
        self.ctx, self.ack_wait_s, self.full_pause_s = ctx, ack_wait_s, full_pause_s
        self.queue = GroupQueue(ctx.settings.reference_tokens_per_batch)
        self.cache = ModelCache(int(ctx.settings.reference_memory_gb * 1e9))
        self._changed = Notifier()
        self.loader = ModelLoader(
            ctx, self.queue, self.cache, self._changed, make_scorer, self._fail_job, self._update_metrics
        )
        self._scored: asyncio.Queue[QueuedGroup] = asyncio.Queue()
        self._readers: set[str] = set()
        """Jobs with a running reader."""
        self._checked: set[str] = set()
        """Jobs whose model paths were readable when their first group arrived; checked again at each load."""
        self._waits_noted: dict[str, float] = {}
        """Unix time up to which the wait of a job's groups is on its timeline."""
        self._full_until: dict[str, float] = {}
        """Jobs whose stream was full at their last group, and when to try again."""
        self.log = structlog.get_logger()
        self.groups = self.tokens = 0
        self.meters = Meters()
        self.lanes = LanesByJob(ctx.bus, ctx.worker)
        gpus = visible() if ctx.settings.reference_device == "cuda" else []
        self.info = worker_info(ctx.worker, Pool.REFERENCE, status="ready", gpus=gpus)

    async def serve(self) -> None:
        try:
            await first_failure(
                {
                    "read": self._read_loop(),
                    "load": self.loader.run(),
                    "score": self._score_loop(),
                    "finish": self._finish_loop(),
                    "extend": self._extend_loop(),
                    "heartbeat": self._heartbeat_loop(),
                    "report": Reporter(self.ctx.bus, self.info.id, self.meters).run(),
                    "timeline": every(REPORT_S, self._report_lanes),
                }
            )
        finally:
            await self.ctx.store.leave(self.info)

    # --- intake -------------------------------------------------------------------------------------------------

    async def _read_loop(self) -> None:
        """Start readers. Returns when the service stops, after forward passes under way have finished and waiting
        groups were returned to the stream."""
        assert SCORES.name is not None
        self.ctx.ready()
        async with asyncio.TaskGroup() as readers:
            while not self.ctx.stopping.is_set():
                for subject in await self.ctx.bus.counts(SCORES.name, SCORE.at(job="*")):
                    job = subject.partition(".")[2]
                    if job not in self._readers:
                        self._readers.add(job)
                        readers.create_task(self._read(job))
                await wait_event(self.ctx.stopping, POLL_S)
        while self.queue.in_flight:
            changed = self._changed.listen()
            for work in self.queue.drop_all():
                await self._give_back(work)
            if self.queue.in_flight:
                await wait_event(changed, POLL_S)

    async def _read(self, job: str) -> None:
        """Consume SCORE of one job while there is capacity. Ends when the job is idle or has finished."""
        over, heard = False, time.monotonic()
        consumer = await self.ctx.bus.consume(
            SCORE, f"score-{job}", batch=PREFETCH, ack_wait_s=self.ack_wait_s, job=job
        )
        try:
            while not self.ctx.stopping.is_set() and time.monotonic() - heard < IDLE_S:
                changed = self._changed.listen()
                full = time.monotonic() < self._full_until.get(job, 0.0)
                room = 0 if full else self.queue.capacity(job, self.cache)
                delivery = await consumer.next(POLL_S if room else 0.0, limit=room)
                if delivery is not None:
                    over = not await self._admit(delivery)
                elif over:
                    break
                elif not room:
                    await wait_event(changed, POLL_S)
                if delivery is not None or not room:
                    heard = time.monotonic()
        except ConsumerDeleted:
            self.log.info("job_consumer_deleted", job=job)
        finally:
            self._readers.discard(job)
            self._checked.discard(job)
            await consumer.close(delete=over)

    async def _admit(self, delivery: Delivery[Group]) -> bool:
        """Queue the group. Returns False if its job has finished, so that its groups are not needed."""
        group = delivery.noun
        if group is None:
            await self._forward_undecodable(delivery)
            return True
        work = QueuedGroup(delivery, group, 1.0, {})
        try:
            if not await self._find_needs(work):
                self.log.info("group_of_ended_job_dropped", job=group.job, group=group.seq)
                await delivery.ack_sync()
                return False
        except JobFailed as error:
            await self._fail_job(group.job, str(error))
            await delivery.ack_sync()
            return False
        self.queue.add(work)
        if not work.needs:
            self._scored.put_nowait(work)
        self._changed.ring()
        return True

    async def _forward_undecodable(self, delivery: Delivery[Group]) -> None:
        """Forward a group that cannot be decoded: the trainer discards and replaces it by the message's id."""
        job = delivery.key.partition("/")[0]  # JOB/NUMBER:ATTEMPT
        self.log.error("undecodable_group_forwarded", group=delivery.key, error=delivery.error)
        try:
            if job and not (await self.ctx.store.job(job)).state.final:
                await self.ctx.bus.publish(UNDECODED_GROUP, msgspec.Raw(delivery.data), delivery.key, job=job)
        except NotFound:
            pass  # the job was deleted
        except StreamFull:
            await delivery.nak(self.full_pause_s)
            return
        await delivery.ack_sync()

    async def _find_needs(self, work: QueuedGroup) -> bool:
        """Set from the job's spec which models the group needs. Returns False if the job has finished. Raises
        JobFailed."""
        try:
            record = await self.ctx.store.job(work.group.job)
            if record.state.final:
                return False
            spec = read_stored(record.spec)
        except NotFound:
            return False
        except SpecError as error:  # stored by another release
            raise JobFailed(f"its stored spec is not valid here: {error}") from error
        try:
            work.group.check()
        except ValueError as error:  # forwarded unchanged: the trainer's own check discards it, so the ledger balances
            self.log.error("invalid_group_forwarded", job=work.group.job, group=work.group.seq, error=str(error))
            return True
        if work.group.job not in self._checked:
            await check_opened(self.ctx.store, self.ctx.settings, work.group.job)
            self._checked.add(work.group.job)
        await asyncio.to_thread((await self.loader.get_scorer()).check, spec)
        work.temperature = spec.rollout.temperature
        work.select(find_models(spec, self.ctx.settings.data_dir, work.group.job))
        work.weights = {judge.name: judge.weight for judge in spec.reward_models}
        return True

    # --- forward passes -----------------------------------------------------------------------------------------

    async def _score_loop(self) -> None:
        """Consume groups that wait for loaded models, produce scored groups."""
        while True:
            changed = self._changed.listen()
            if (batch := self.queue.take(self.cache)) is None:
                await wait_event(changed, 1.0)
                continue
            await self._run_pass(*batch)
            self._changed.ring()

    async def _run_pass(self, key: ModelKey, works: list[QueuedGroup]) -> None:
        """Run a pass in a separate frame: a variable of the loop would keep the model in memory after eviction."""
        with self.cache.use(key) as model:
            await self._forward(key, model, works)

    async def _forward(self, key: ModelKey, model: Any, works: list[QueuedGroup]) -> None:
        """Run one pass. If it fails, score the groups one by one, so that only the job at fault fails."""
        scorer = await self.loader.get_scorer()
        groups, temperatures = [work.part(key) for work in works], [work.temperature for work in works]
        before, began = scorer.computed, time.time()
        try:
            results = await asyncio.to_thread(scorer.score, model, groups, temperatures)
        except (JobFailed, *MODEL_ERRORS) as error:
            if len(works) > 1:
                for work in works:
                    await self._forward(key, model, [work])
                return
            (group,) = groups
            why = str(error) if isinstance(error, JobFailed) else f"group {group.seq}: {describe_error(error)}"
            await self._fail_job(group.job, f"model {key.base!r} could not score it: {why}")
            await self._acknowledge(works[0])
            return
        ended = time.time()
        for job, count in Counter(group.job for group in groups).items():
            self._note_wait(job, "queue", min(work.queued for work in works if work.group.job == job), began)
            self.lanes.of(job).note("reference", "score", began, ended, level=count)
        counts = self.meters.of(CLUSTER).counts
        counts["reference/passes"] += 1
        counts["reference/passed_groups"] += len(works)
        counts["reference/computed_tokens"] += scorer.computed - before
        for work, found in zip(works, results, strict=True):
            if self.queue.complete(key, work, found):
                self._scored.put_nowait(work)

    async def _report_lanes(self) -> None:
        """Produce TIMELINE: passes since the last report, and the waits of groups up to now."""
        now, waits = time.time(), self.queue.waits(self.cache)
        jobs = {work.group.job for work in self.queue.in_flight}
        self._waits_noted = {job: at for job, at in self._waits_noted.items() if job in jobs}
        for job, (since, is_loaded) in waits.items():
            self._note_wait(job, "queue" if is_loaded else "loading", since, now)
        await self.lanes.report()

    def _note_wait(self, job: str, kind: str, since: float, end: float) -> None:
        """Put the wait of a job's groups on its timeline, without what is there already."""
        noted = self._waits_noted.get(job, 0.0)
        if (start := max(since, noted)) < end:
            self.lanes.of(job).note("reference", kind, start, end, since=since if start > since else 0.0)
            self._waits_noted[job] = end

    # --- output -------------------------------------------------------------------------------------------------

    async def _finish_loop(self) -> None:
        """Consume scored groups, produce GROUP and acknowledgements."""
        while True:
            works = [await self._scored.get()]
            while not self._scored.empty():
                works.append(self._scored.get_nowait())
            await asyncio.gather(*map(self._finish, works))
            self._update_metrics()
            self._changed.ring()

    async def _finish(self, work: QueuedGroup) -> None:
        """Store the group durably, then acknowledge it; a redelivered group has the same message id and is stored
        once."""
        group = work.put_back(add_results(work.group, work.results, work.weights))
        attempt = group.trajectories[0].attempt if group.trajectories else ""
        try:
            await self.ctx.bus.publish(GROUP, group, f"{group.key}:{attempt}", job=group.job)
        except StreamFull as error:
            await self._retry_later(work, error)
            return
        except TooLarge as error:
            await self._fail_job(
                group.job,
                f"group {group.seq} with the added model outputs does not fit into one message ({error}): lower "
                f"algorithm.group_size ({group.samples}) or rollout.context_length, or raise max_payload",
            )
        else:
            self._full_until.pop(group.job, None)
            self._count(work)
        await self._acknowledge(work)

    async def _retry_later(self, work: QueuedGroup, error: StreamFull) -> None:
        """Keep the group in flight, so that nothing is computed twice; return it if the service stops."""
        job = work.group.job
        if job not in self._full_until:  # logged once, until one of its groups is stored
            self.log.warning("stream_full", job=job, error=str(error))
        self._full_until[job] = time.monotonic() + self.full_pause_s
        if self.ctx.stopping.is_set():
            await self._give_back(work)
        else:
            asyncio.get_running_loop().call_later(self.full_pause_s, self._scored.put_nowait, work)

    def _count(self, work: QueuedGroup) -> None:
        self.groups += 1
        self.tokens += work.tokens
        counts = self.meters.of(work.group.job).counts
        counts["reference/groups"] += 1
        counts["reference/tokens"] += work.tokens

    async def _acknowledge(self, work: QueuedGroup) -> None:
        await work.delivery.ack_sync()
        self.queue.release(work)

    async def _give_back(self, work: QueuedGroup) -> None:
        await work.delivery.nak()
        self.queue.release(work)

    async def _fail_job(self, job: str, reason: str) -> None:
        self.log.error("reference_unusable", job=job, error=reason)
        with contextlib.suppress(Conflict, NotFound):  # it has finished in between
            await self.ctx.store.transition(job, JobState.FAILED, reason=f"reference-forward: {reason}")
        for work in self.queue.drop({job}):
            await self._acknowledge(work)

    # --- heartbeats and metrics ---------------------------------------------------------------------------------

    async def _extend_loop(self) -> None:
        """Extend the acknowledgement deadline of groups in flight (a model may have to be loaded first), so that they
        are not delivered to another instance."""
        while True:
            await sleep(self.ack_wait_s / 3)
            for work in list(self.queue.in_flight):
                await work.delivery.in_progress()

    async def _heartbeat_loop(self) -> None:
        while True:
            detail = {"groups": self.groups, "tokens": self.tokens, "models_bytes": self.cache.used_bytes}
            await self.ctx.store.beat(msgspec.structs.replace(self.info, detail=detail), self.ctx.settings.worker_ttl_s)
            await sleep(self.ctx.settings.heartbeat_s)

    def _update_metrics(self) -> None:
        meter = self.meters.of(CLUSTER)
        meter.counts["reference/loads"] = self.cache.loads
        meter.counts["reference/evictions"] = self.cache.evictions
        meter.gauges["reference/models"] = len(self.cache)
        meter.gauges["reference/models_bytes"] = self.cache.used_bytes
        meter.gauges["reference/groups_in_hand"] = len(self.queue.in_flight)


async def serve(ctx: Context) -> None:
    settings = ctx.settings

    def make_scorer() -> Scorer:
        from opentinker.services.reference_forward.scorer import Scorer

        return Scorer(device=settings.reference_device, tokens_per_batch=settings.reference_tokens_per_batch)

    if settings.reference_device != "cpu":
        ready = await asyncio.to_thread(make_scorer)  # a missing GPU fails the start, not the first group
        await ReferenceForward(ctx, lambda: ready).serve()
    else:
        await ReferenceForward(ctx, make_scorer).serve()
