"""Trains the models of clients of the Tinker API: the work of a lease of a job of kind `tinker`.

intake   consumes COMMAND, and hands it to the runner of its model (`model_runner.py`)
models   each consumes its commands in order; produces answers, ANSWERED, checkpoints and stored states
tidy     removes expired checkpoints, old files of samplers, and what the stream keeps of covered commands
report   produces METRIC
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from functools import partial
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError

from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.tinker import model_files, sampler_files
from opentinker.services.trainer.tinker.command_intake import Arrived, CommandIntake
from opentinker.services.trainer.tinker.model_curves import REPORT_S, ModelCurves
from opentinker.services.trainer.tinker.model_runner import ModelRunner
from opentinker.services.trainer.tinker.tinker_lease import TinkerLease
from opentinker.shared.asyncio_tools import (
    cancel_and_wait,
    check_cancelled,
    every,
    every_despite,
    finish_uncancelled,
    forward_exception,
)
from opentinker.shared.messaging.consumer import ConsumerDeleted
from opentinker.shared.runtime.job_logs import outside_job_log
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import JobState, Lease
from opentinker.shared.types.errors import Conflict, Fenced, NotFound
from opentinker.shared.types.tinker import Failed

log = structlog.get_logger()

PURGE_S = 10.0
TIDY_S = 60.0
CLOSE_S = 10.0
"""Commands under way may end within this time after the end of the lease; others are carried out by the next one."""


class TinkerJob:
    """Runs one lease's work. Raises JobFailed when the job cannot continue, Fenced when a newer epoch owns it."""

    def __init__(self, worker: LeasedWorker, lease: Lease, spec: JobSpec, bank: BankLoop) -> None:
        self.worker, self.lease, self.ctx = worker, lease, worker.ctx
        self._models: dict[str, tuple[ModelRunner, asyncio.Task[None]]] = {}
        records = TinkerStore(self.ctx.store.redis)
        self._curves = ModelCurves(self.ctx.bus, lease.job, records, lambda: len(self._models))
        self._shared = TinkerLease(self.ctx, lease, spec, bank, records, self._curves, worker.spent)
        self._intake = CommandIntake(self.ctx, lease, self._offer)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._base = bank_of(spec.model_dump())
        self._first_step = 0
        """Optimizer steps of all models before this lease."""
        self._shown_step = -1

    @property
    def tokens(self) -> int:
        """Tokens of its passes so far."""
        return self._curves.tokens

    async def run(self) -> None:
        """Serve until the lease ends or is taken back, or the service stops."""
        try:
            await self._intake.open()
            job = await self.ctx.store.job(self.lease.job)
            self._first_step, self._curves.tenant = job.step, job.tenant
            await self._show(resumed_step=self._first_step)
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            with contextlib.suppress(Conflict):  # cancelled in between: the lease is about to end
                await self.ctx.store.transition(
                    self.lease.job, JobState.RUNNING, allowed=(JobState.STARTING, JobState.RUNNING),
                    epoch=self.lease.epoch,
                )  # fmt: skip
            check_cancelled()
            await first_failure({
                "intake": self._intake.run(),
                "broken": self._failure(),
                "purge": every(PURGE_S, self._purge),
                "tidy": self._tidy_loop(),
                "report": every(REPORT_S, self._report),
                "end": self.worker.ended(),
            })  # fmt: skip
        finally:
            await finish_uncancelled(self._close())

    async def _failure(self) -> None:
        await asyncio.shield(self._broken)

    def _offer(self, arrived: Arrived) -> None:
        if arrived.model not in self._models:
            forget = partial(self._forget, arrived.model)
            runner = ModelRunner(self._shared, self._intake, arrived.model, forget=forget, broken=self._broken)
            with self._log_of("" if arrived.command is None else arrived.command.tenant):
                task = asyncio.create_task(runner.run(), name=arrived.model)
            task.add_done_callback(lambda done: forward_exception(done, self._broken))
            self._models[arrived.model] = runner, task
        self._models[arrived.model][0].offer(arrived)

    def _log_of(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Lines of the block go to the job's log if they are about what belongs to the job's tenant, who reads it."""
        return contextlib.nullcontext() if tenant == self._curves.tenant else outside_job_log()

    async def _report(self) -> None:
        await self._curves.report()
        self.worker.tell({"base": self._base, "queue": self._shared.queue_reason})
        if self._first_step + self._curves.steps != self._shown_step:
            await self._show()

    async def _show(self, **fields: Any) -> None:
        """Show how far the models are, in the job's record."""
        self._shown_step = self._first_step + self._curves.steps
        if self._curves.loss is not None:
            fields["progress"] = orjson.dumps({"loss": self._curves.loss}).decode()
            fields["curve"] = orjson.dumps([float(f"{value:.4g}") for value in self._curves.curve.values]).decode()
        await self.ctx.store.update(self.lease.job, epoch=self.lease.epoch, step=self._shown_step, **fields)

    def _forget(self, model: str) -> None:
        del self._models[model]
        self._curves.forget(model)

    async def _purge(self) -> None:
        await self._intake.purge(
            lambda: [place for runner, _ in self._models.values() for place in runner.uncovered.values()]
        )

    async def _tidy_loop(self) -> None:
        with outside_job_log():
            await every_despite(TIDY_S, self._tidy, "tidy_failed", OSError)

    async def _tidy(self) -> None:
        """Remove files of samplers that no client uses any longer, and that were replaced or whose model has ended;
        note the bytes of the others, by tenant."""
        records, unlisted = self._shared.records, Counter[str]()
        for model in await records.models_of(self.lease.job):
            unlisted[await records.tenant_of(model)] += await self._tidy_model(model)
        await records.set_unlisted(self.lease.job, unlisted)

    async def _tidy_model(self, model: str) -> int:
        """Return the bytes of the weights that stay, and that no checkpoint of the model has."""
        records, is_full = self._shared.records, self._shared.spec.tinker.full_weights
        most = sampler_files.FULL_MOST_KEPT if is_full else sampler_files.MOST_KEPT
        longest_s = sampler_files.FULL_KEPT_S if is_full else sampler_files.KEPT_S
        place, now = self._shared.place(model), time.time()
        kept = await sampler_files.kept_for_clients(records, model, most=most)
        remove = partial(sampler_files.remove_replaced, kept=kept, now=now, most=most)
        ended = await asyncio.to_thread((place / "state" / model_files.ENDED).exists)
        root = place / "samplers"
        newest = set() if ended else await asyncio.to_thread(sampler_files.newest_of, root)
        await asyncio.to_thread(remove, root, newest=newest, kept_s=longest_s)
        left = await asyncio.to_thread(sampler_files.bytes_beside, root, set())
        found = await records.checkpoints(model)
        for kind, kind_s in sampler_files.KEPT_OF.items():
            newest = {one.place for one in found if one.kind == kind}
            await asyncio.to_thread(remove, place / kind, newest=newest, kept_s=min(kind_s, longest_s))
            left += await asyncio.to_thread(sampler_files.bytes_beside, place / kind, newest)
        return left

    async def _close(self) -> None:
        """Store what has changed, unless the job is over: then answer what waits. No step prevents the next one."""
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._intake.close)
            steps.callback(self._curves.close)
            steps.push_async_callback(self._curves.report)
            steps.push_async_callback(self._close_runners)
            await cancel_and_wait(*(task for _, task in self._models.values()))

    async def _close_runners(self) -> None:
        runners, is_over = [runner for runner, _ in self._models.values()], await self._is_over()
        save_s = 0.0 if is_over else CLOSE_S
        await asyncio.gather(*(self._close_runner(runner, save_s) for runner in runners), return_exceptions=True)
        if is_over:
            over = Failed(error="the Tinker server has ended", category="server")
            for runner in runners:
                for request in runner.unanswered:
                    await self._shared.answer(request, over, runner.tenant)
        else:
            with contextlib.suppress(Fenced, ConsumerDeleted):
                await self._purge()

    async def _close_runner(self, runner: ModelRunner, save_s: float) -> None:
        with self._log_of(runner.tenant):
            try:
                await runner.close(save_s=save_s)
            except Exception as error:  # noqa: BLE001 - its commands are carried out again
                log.warning("model_not_stored", model=runner.model, error=str(error))

    async def _is_over(self) -> bool:
        """Return whether the job has ended; no if Redis does not say."""
        try:
            return (await self.ctx.store.job(self.lease.job)).state.final
        except NotFound:
            return True
        except RedisError as error:
            log.warning("job_not_read", error=str(error) or type(error).__name__)
            return False
