"""Reports a training job: metrics, events, checkpoints and its ending. `resume.py` loads the newest checkpoint.

The training loop decides when to report and fills in the manifest beyond the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
import structlog
from redis.exceptions import RedisError

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.learners.base import (
    Interrupted,
    NonFinite,
    TooLong,
    Trainable,
    describe_out_of_memory,
    is_out_of_memory,
)
from opentinker.services.trainer.learning_check import LearningCheck
from opentinker.services.trainer.policy_checkpoints import PolicyCheckpoints
from opentinker.services.trainer.progress_curve import ProgressCurve
from opentinker.services.trainer.training_alarms import TrainingAlarms
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled
from opentinker.shared.data.step_log import StepLog, lineage, metric_prefix, point_of, trainer_source
from opentinker.shared.evaluation.records import Evaluations
from opentinker.shared.messaging.subjects import METRIC, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import SENT_AGAIN, MetricSource
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.runtime.tracing import trace_id
from opentinker.shared.spec import JobSpec, StartSpec
from opentinker.shared.spec.evaluation import PREFIX
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, WeightVersion, part_id
from opentinker.shared.types.errors import Conflict, Fenced, JobFailed, OpenTinkerError
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.match_results import FILE as MATCHES
from opentinker.shared.types.match_results import MatchResult

log = structlog.get_logger()
T = TypeVar("T")

TARGET_WINDOW = 10
"""Steps over which `train.target` averages a metric."""


class JobReporter:
    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        spec: JobSpec,
        learner: Trainable,
        trace: str = "",
        policy: str = "",
        joint: JointProgress | None = None,
    ) -> None:
        """`trace`: the job's traceparent. `policy`: whose, of a job with several; `joint`: what they have in common."""
        self.ctx, self.lease, self.spec, self.learner, self.policy = ctx, lease, spec, learner, policy
        self.joint = joint or JointProgress(spec.train.steps, {"": spec.train.steps})
        self.root: Path = ctx.settings.data_dir / "jobs" / part_id(lease.job, policy) / "checkpoints"
        together = list(spec.policies) if spec.train.deterministic else []
        roots = {
            name: ctx.settings.data_dir / "jobs" / part_id(lease.job, name) / "checkpoints" for name in spec.policies
        }
        in_step = roots if self.joint.goes_back_together else {}
        self.stored = PolicyCheckpoints(self.root, [roots[name] for name in together], self.joint, in_step)
        self.source = trainer_source(policy)
        self.metrics = MetricSource(ctx.bus, lease.job, self.source, prefix=metric_prefix(policy))
        self.lanes = Lanes(ctx.bus, lease.job, ctx.worker)
        self._log = StepLog(self.root.parent / "metrics.jsonl")
        self._results = StepLog(self.root.parent / MATCHES)
        self._log_refused = False
        self._trace = trace
        self.usage = UsageStore(ctx.store.redis)
        self.evaluations = Evaluations(
            ctx.bus, lease.job, self.root.parent, self.event, self.guard, policy, self.joint.ratings
        )
        self.alarms = TrainingAlarms(spec.train, spec.algorithm, self.event)
        self._learning_check = LearningCheck(spec.algorithm)
        self._curve = ProgressCurve()
        self._window: deque[dict[str, float]] = deque(maxlen=TARGET_WINDOW)
        self.saved: int | None = None
        """Step of the newest good checkpoint."""
        self._resumed_at: int | None = None
        self._running = False
        self._weights_valid = False
        """Whether the weights are those of a step that succeeded."""

    async def continue_from(self, manifest: Manifest) -> None:
        """Take over the metrics of the steps up to a checkpoint, and send those that the metric history lacks."""
        self.saved = self._resumed_at = manifest.step
        lines = await asyncio.to_thread(lineage, self.root.parent / "metrics.jsonl", manifest.resumed, manifest.step)
        self._window.extend(lines[-TARGET_WINDOW:])
        self.alarms.restore(lines)
        await self._resend_missing(lines[-SENT_AGAIN:])
        for line in lines:
            self._learning_check.update(line)
            self._curve.add(line)

    async def loaded(self, manifest: Manifest | None, start: StartSpec | None) -> None:
        """Record that the weights are loaded: from a checkpoint of this job or another, or of the base model."""
        step = manifest.step if manifest else 0
        detail: dict[str, object] = {"step": step, "epoch": self.lease.epoch}
        if start is not None:
            detail |= {"from": start.checkpoint, "optimizer": start.optimizer}
        event = "resumed" if manifest else "model_loaded"
        earlier = manifest.resumed if manifest else {}
        job_step = self.joint.restore(self.policy, step, {**earlier, self.lease.epoch: step})
        fields: dict[str, Any] = {} if job_step is None else {"step": job_step, "resumed_step": job_step}
        await self.ctx.store.update(
            self.lease.job, epoch=self.lease.epoch, event=event, detail=self._own(detail), **fields
        )
        log.info(event, **self._own(detail))

    def _own(self, detail: dict[str, object]) -> dict[str, object]:
        return {"policy": self.policy, **detail} if self.policy else detail

    async def _resend_missing(self, lines: list[dict[str, Any]]) -> None:
        """Send the points of these steps that the metric history lacks: NATS server and trainer died together."""
        newest = await self.ctx.bus.last(METRIC, job=self.lease.job, source=self.source)
        for number, line in enumerate(lines, 1):
            if "point" in line and (newest is None or line["time"] > newest.time):
                await self.metrics.send(point_of(part_id(self.lease.job, self.policy), line, number))

    async def running(self) -> None:
        """Mark the job as running. Idempotent."""
        if self._running:
            return
        self._running = True
        with contextlib.suppress(Conflict):  # cancelled in between: the lease is about to end
            await self.ctx.store.transition(
                self.lease.job,
                JobState.RUNNING,
                allowed=(JobState.STARTING, JobState.RUNNING),
                epoch=self.lease.epoch,
            )

    async def compute(self, step: int, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run the work of `step` in a thread. Raises JobFailed for a refused step or one that does not fit into memory.

        After any exception but Interrupted and TooLong the weights are in doubt and will not be saved.
        """
        before, self._weights_valid = self._weights_valid, False
        try:
            with (
                self.ctx.tracer.span("step", self._trace, job=self.lease.job, step=step),
                self.lanes.busy("training", "step", str(WeightVersion(self.lease.epoch, step))),
            ):
                values = await asyncio.to_thread(work)
                self._note_waits(values)
        except (Interrupted, TooLong):
            self._weights_valid = before
            raise
        except NonFinite as error:
            raise NonFinite(f"step {step} was refused: {error}; {self.describe_last_checkpoint()}") from None
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise JobFailed(
                f"step {step}: {describe_out_of_memory(error)}; {self.describe_last_checkpoint()}"
            ) from None
        self._weights_valid = True
        return values

    def _note_waits(self, values: Mapping[str, float]) -> None:
        """Put on the timeline how long a step waited for other jobs of a shared trainer, at its end, because only the
        sum is known. The wait for other policies of its job is training."""
        waited_s, now = values.get("trainer/bank_other_jobs_seconds", 0.0), time.time()
        if waited_s:
            self.lanes.note("training", "queue", now - waited_s, now)

    async def run_interruptible(self, work: Awaitable[T], interrupt: Callable[[], None] | None = None) -> T:
        """Run long work, by default the learner's; when the job is cancelled, interrupt it and wait for its end."""
        working = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            (interrupt or self.learner.interrupt)()
            with contextlib.suppress(Interrupted):
                await finish_uncancelled(working)
            raise

    @contextlib.asynccontextmanager
    async def save_on_exit(self, save: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Save the trained weights if the job fails, is cancelled, or loses its lease."""
        showing = asyncio.create_task(self.lanes.run())
        try:
            yield
        except JobFailed:
            if self._weights_valid:
                try:
                    await finish_uncancelled(save())
                except OpenTinkerError as error:  # the owner must see why the job failed, not this error
                    log.warning("checkpoint_not_saved", error=str(error))
            raise
        except asyncio.CancelledError:
            if self._weights_valid:
                try:
                    await finish_uncancelled(save())
                except Fenced as error:
                    log.warning("checkpoint_refused", error=str(error))
            raise
        finally:
            self.close()
            await cancel_and_wait(showing)
            await self.lanes.report()

    async def step(
        self, step: int, values: dict[str, float], matches: Sequence[MatchResult] = (), **line: object
    ) -> None:
        """Report an optimizer step: metrics to the history and, together with `line`, to the job's log, and the results
        of its matches to theirs. Raises Fenced before any of that."""
        await self.guard()
        absent = sorted(name for name in self.spec.train.target if name not in values and not name.startswith(PREFIX))
        if step == 1 and absent:
            log.warning("target_metric_absent", metrics=absent)
            await self.event("target_metric_absent", {"metrics": absent, "there_are": sorted(values)})
        self._learning_check.update(values)
        self._curve.add(values)
        await self.alarms.update(step, values)
        self._window.append(values)
        point = await self.metrics.emit(step, values)
        of_step = {"epoch": self.lease.epoch, "step": step, "time": point.time}
        await self.write_log(
            step,
            {
                **of_step,
                "trace": trace_id(self._trace),
                "point": [point.incarnation, point.seq],
                **line,
                **{name.removeprefix(metric_prefix(self.policy)): value for name, value in point.values.items()},
            },
            {**of_step, "matches": msgspec.to_builtins(matches)} if matches else None,
        )
        if self.joint.rates:
            self.joint.ratings.add_matches(self.policy, matches)
        names = ("reward/mean", "exact", "loss", *self.spec.train.target)
        shown = {name: values[name] for name in names if name in values} | self._step_time()
        await self.ctx.store.update(
            self.lease.job,
            epoch=self.lease.epoch,
            step=self.joint.advance(self.policy, step),
            progress=orjson.dumps(self.joint.show(self.policy, shown)).decode(),
            **self._shown_curve(),
        )
        await self.usage.trained(self.lease.job, step, values.get("tokens", 0.0), self.policy)

    def _shown_curve(self) -> dict[str, Any]:
        """Return the curve as a field of the job's record; of several policies the first one's."""
        is_first = self.policy == next(iter(self.spec.policies), "")
        values = [float(f"{value:.4g}") for value in self._curve.values]
        return {"curve": orjson.dumps(values).decode()} if is_first else {}

    def _step_time(self) -> dict[str, float]:
        """Return the mean seconds per step over the last steps, for the progress record."""
        took = [line["step_seconds"] for line in self._window if "step_seconds" in line]
        return {"step_seconds": sum(took) / len(took)} if took else {}

    async def write_log(
        self, step: int, line: dict[str, object] | None = None, result: dict[str, object] | None = None
    ) -> None:
        """Append one line per step, also of steps rolled back later, and one of its matches if it has any; without a
        line, make both logs durable.

        A disk error is reported once and tried again.
        """
        try:
            await asyncio.to_thread(self._write_lines, line, result)
            self._log_refused = False
        except OSError as error:
            if not self._log_refused:
                log.error("metrics_log_failed", error=str(error))
                await self.event("metrics_log_failed", {"step": step, "error": str(error)})
            self._log_refused = True

    def _write_lines(self, line: dict[str, object] | None, result: dict[str, object] | None) -> None:
        """Blocking. What one file refuses is kept for the next time, see StepLog, and still written to the other."""
        try:
            if line is None:
                self._results.sync()
            elif result is not None:
                self._results.add(result)
        finally:
            if line is None:
                self._log.sync()
            else:
                self._log.add(line)

    def target_met(self) -> bool:
        """Return whether the means of the last steps, and the last evaluation where named, have reached the target."""
        target = self.spec.train.target
        if not target or (len(self._window) < TARGET_WINDOW and not all(name.startswith(PREFIX) for name in target)):
            return False
        reached = {
            name: self.evaluations.last.get(name, float("-inf"))
            if name.startswith(PREFIX)
            else sum(v.get(name, float("-inf")) for v in self._window) / TARGET_WINDOW
            for name in target
        }
        return all(reached[name] >= wanted for name, wanted in target.items())

    @property
    def target_uses_evaluation(self) -> bool:
        """Return whether evaluations decide when to stop: then training waits for each."""
        return any(name.startswith(PREFIX) for name in self.spec.train.target)

    async def commit(self, manifest: Manifest, *, last: bool) -> bool:
        """Commit a checkpoint and remove expired ones. Returns whether it was written.

        If it cannot be written the job continues and tries again at the next checkpoint; only the last one is required:
        then it raises JobFailed. Raises Fenced if a newer epoch owns the job, even if its trainer has not yet fenced
        the directory.
        """
        began = time.monotonic()
        with contextlib.suppress(RedisError):  # the job cannot be leased again while Redis is away
            await self.guard()
        await self.write_log(manifest.step)
        try:
            with self.lanes.busy("training", "checkpoint", str(manifest.version)):
                await asyncio.to_thread(checkpoint.commit, self.root, manifest, self.learner.save)
        except JobFailed as error:
            if last:
                raise
            log.error("checkpoint_failed", error=str(error))
            await self.event("checkpoint_failed", {"step": manifest.step, "error": str(error)})
            return False
        await asyncio.to_thread(self.stored.sweep, self.spec.train.keep_checkpoints, self.lease.epoch)
        self.saved = manifest.step
        await self.event("checkpoint", {"step": manifest.step, "seconds": round(time.monotonic() - began, 3)})
        return True

    async def guard(self) -> None:
        """Raise Fenced if a newer epoch owns the job; called before writes that bypass the store's scripts."""
        await self.ctx.store.require_epoch(self.lease.job, self.lease.epoch)

    async def event(self, event: str, detail: dict[str, object]) -> None:
        await self.ctx.store.update(self.lease.job, epoch=self.lease.epoch, event=event, detail=self._own(detail))

    def describe_last_checkpoint(self) -> str:
        return "there is no checkpoint yet" if self.saved is None else f"the last good checkpoint is step {self.saved}"

    async def succeed(self, step: int) -> None:
        """Mark the job as succeeded once everything is saved, of its last policy that finishes. If nothing was learned,
        its reason says so."""
        why = "target reached" if self.target_met() else ""
        if self.spec.kind == "rl" and not why and (why := self._learning_check.warning):
            log.warning("nothing_learned", steps=step)
            await self.event("nothing_learned", {"steps": step, "why": why})
        self.joint.advance(self.policy, step)
        self.joint.finish(self.policy, why)
        if not self.joint.all_finished:
            if step != self._resumed_at:
                await self.event("policy_finished", {"step": step, "reason": why})
            return
        await self.ctx.bus.settle()  # the last metrics arrive before the end of the job
        with contextlib.suppress(Conflict):  # cancelled or failed in between: the lease is about to end
            await self.ctx.store.transition(
                self.lease.job,
                JobState.SUCCEEDED,
                epoch=self.lease.epoch,
                step=self.joint.step,
                reason=self.joint.reason,
            )
        await self.ctx.bus.emit(WAKE, {"job": self.lease.job}, who="scheduler")

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()
