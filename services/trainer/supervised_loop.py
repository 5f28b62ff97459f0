"""Training of one sft or dpo job: the reporter, checkpoints and ending of the RL loop, without generation.

    run   consumes the rows of [data], in an order determined by the seed; produces weights, METRIC, checkpoints;
          waits for nothing; ends after its last step, at the target, or when the service stops

Progress is one number, the rows used so far, stored in the manifest of each checkpoint.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import structlog

from opentinker.services.trainer.data.examples import Examples, fingerprint, load_examples, places
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.base import Interrupted, RowLearner
from opentinker.services.trainer.resume import resume
from opentinker.shared.asyncio_tools import check_cancelled, finish_uncancelled
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.evaluation import PREFIX
from opentinker.shared.types.core import Lease, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import DataCursor, Manifest

log = structlog.get_logger()


class SupervisedJob:
    """Runs one lease's work. Raises JobFailed when the job cannot continue, Fenced when a newer epoch owns it."""

    def __init__(
        self,
        worker: LeasedWorker,
        lease: Lease,
        spec: JobSpec,
        learner: RowLearner,
        load: Callable[[JobSpec, Callable[[], None]], Examples] = load_examples,
    ) -> None:
        assert spec.data is not None
        self.worker, self.lease, self.spec, self.data, self.learner = worker, lease, spec, spec.data, learner
        self.ctx = worker.ctx
        self.reporter = JobReporter(self.ctx, lease, spec, learner, worker.trace)
        self.step = 0
        self.resumed = {lease.epoch: 0}
        """See `Manifest.resumed`."""
        self._load = load
        self.examples: Examples
        self.steps = spec.train.steps
        """Total steps of the job; with data.epochs it is known once the rows are counted."""

    async def run(self) -> None:
        async with self.reporter.save_on_exit(self._save):
            await self._read()
            await self._restore()
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            await self.reporter.running()
            await self._train()

    # --- start and resume ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read the rows before the model is loaded, so that errors in them are found early."""
        began = time.monotonic()
        async with opening(self.ctx.store, self.ctx.settings, self.lease.job):
            self.examples = examples = await self._read_rows()
        self.fingerprint = await finish_uncancelled(asyncio.to_thread(fingerprint, examples.train))
        if self.data.epochs is not None:
            self.steps = -(-self.data.epochs * len(examples.train) // self.data.batch_size)
            self.learner.total_steps = self.steps
            if self.spec.train.warmup_steps > self.steps:
                raise JobFailed(
                    f"train.warmup_steps = {self.spec.train.warmup_steps} is larger than the {self.steps} steps that "
                    f"data.epochs = {self.data.epochs} makes"
                )
        detail = {
            "rows": len(examples.train),
            "validation_rows": len(examples.validation),
            **{name: examples.counts[name] for name in ("longer", "dropped", "cut") if examples.counts[name]},
            "longest": examples.longest,
            "steps": self.steps,
            "seconds": round(time.monotonic() - began, 3),
        }
        log.info("data_loaded", **detail)
        await self.ctx.store.update(
            self.lease.job, epoch=self.lease.epoch, event="data_loaded", detail=detail, steps=self.steps
        )

    async def _read_rows(self) -> Examples:
        """Read rows in a thread, which stops at the next row when the job is cancelled."""
        cancelled = threading.Event()

        def check_interrupt() -> None:
            if cancelled.is_set():
                raise Interrupted("the job was cancelled")

        reading = asyncio.to_thread(self._load, self.spec, check_interrupt)
        return await self.reporter.run_interruptible(reading, interrupt=cancelled.set)

    async def _restore(self) -> None:
        manifest = await resume(self.reporter)
        if manifest is not None:
            self.step = manifest.step
            self.resumed = {**manifest.resumed, self.lease.epoch: manifest.step}
            cursor = self._cursor
            if manifest.data != cursor:
                raise JobFailed(
                    f"checkpoint {manifest.name} was made from other rows ({manifest.data}, now {cursor}): the data "
                    "has changed since, so that the job cannot continue"
                )
        examples = [*self.examples.train, *self.examples.validation]
        home = self.reporter.root.parent
        await self.reporter.run_interruptible(asyncio.to_thread(self.learner.prepare, examples, home))

    @property
    def _cursor(self) -> DataCursor:
        rows = len(self.examples.train)
        return DataCursor(position=self._used(self.step), rows=rows, fingerprint=self.fingerprint)

    def _used(self, step: int) -> int:
        """Return the rows used in the first `step` steps; only the last batch of the last epoch may be smaller."""
        used = step * self.data.batch_size
        return used if self.data.epochs is None else min(used, self.data.epochs * len(self.examples.train))

    # --- training -----------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        if self.step == 0:
            await self._validate()
        while self.step < self.steps and not self.reporter.target_met():
            check_cancelled()
            if self.ctx.stopping.is_set():
                await finish_uncancelled(self._save())
                return
            await self.reporter.run_interruptible(self._advance())
            every = self.data.validate_every
            if every is not None and self.step % every == 0:
                await self._validate()
            if self.step % self.spec.train.checkpoint_every == 0 and self.step < self.steps:
                await finish_uncancelled(self._save())
        await self._validate()
        await finish_uncancelled(self._save(last=True))
        await self.reporter.succeed(self.step)

    async def _advance(self) -> None:
        """Run and report one step; if the job is cancelled during it, the step is undone or completed."""
        began = time.monotonic()
        first, rows = self._used(self.step), self.examples.train
        chosen = places(
            first,
            self._used(self.step + 1) - first,
            len(rows),
            seed=self.spec.train.seed,
            shuffle=self.data.shuffle,
        )
        batch = [rows[place] for place in chosen]
        values = await self.reporter.compute(self.step + 1, lambda: self.learner.step(batch))
        self.step += 1
        values["train_seconds"] = values.pop("step_seconds", time.monotonic() - began)
        values |= {"rows": float(len(chosen)), "epochs": self._used(self.step) / len(rows)}
        values["step_seconds"] = time.monotonic() - began
        values["trainer/tokens_per_s"] = values["tokens"] / values["step_seconds"]
        await self.reporter.step(self.step, values, data=chosen)

    async def _validate(self) -> None:
        """Evaluate the current weights, unless that was done."""
        if not self.examples.validation or self.step in self.reporter.evaluations.steps:
            return
        began = time.monotonic()
        version = WeightVersion(self.lease.epoch, self.step)
        with self.reporter.lanes.busy("training", "evaluation", str(version)):
            found = await self.reporter.run_interruptible(
                asyncio.to_thread(self.learner.evaluate, self.examples.validation)
            )
        values = {f"{PREFIX}{name}": value for name, value in found.items()}
        values[f"{PREFIX}seconds"] = time.monotonic() - began
        await self.reporter.evaluations.add(version, values, self.spec.train.target)

    async def _save(self, *, last: bool = False) -> None:
        """Commit a checkpoint of the current step, unless there is one."""
        if self.reporter.saved == self.step:
            return
        manifest = Manifest(
            job=self.lease.job,
            epoch=self.lease.epoch,
            step=self.step,
            version=WeightVersion(self.lease.epoch, self.step),
            resumed=self.resumed,
            data=self._cursor,
        )
        await self.reporter.commit(manifest, last=last)
