"""Serves a trainer process whose jobs share a base model (setting `bank_jobs`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from opentinker.services.trainer.cpu_shares import CpuShare
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.services.trainer.shared_base import SharedBase
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.asyncio_tools import finish_uncancelled, gather_all
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed, OpenTinkerError

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.bank_loop import BankLoop


async def serve_shared(ctx: Context) -> None:
    """Serve `bank_jobs` workers, named PROCESS.0, PROCESS.1 and so on."""
    if ctx.settings.idle_exit_s is not None:
        raise OpenTinkerError("idle_exit_s does not apply to a trainer with bank_jobs; leave one of them out")
    if ctx.settings.preload:
        await asyncio.to_thread(_learners)
    async with SharedBase(ctx) as shared:

        async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
            await _train(shared, worker, lease, spec)

        names = [f"{ctx.worker}.{number}" for number in range(ctx.settings.bank_jobs)]
        workers = [
            LeasedWorker(
                replace(ctx, worker=name), Pool.TRAINER, work, bank=ctx.worker, cpu=partial(shared.cpu.seconds, name)
            )
            for name in names
        ]

        async def serve_all() -> None:
            await gather_all([worker.serve() for worker in workers])

        ctx.ready()
        await first_failure({"jobs": serve_all(), "bank": shared.failure()})


async def _train(shared: SharedBase, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    base = bank_of(spec.model_dump())
    if not base:
        raise JobFailed("resources.trainer is 'own', and this trainer shares its base; set bank_jobs = 0 for it")
    worker.tell({"base": base})
    with shared.cpu.job(worker.ctx.worker) as share:
        async with shared.bank_for(lease.job, spec) as bank:
            if spec.kind == "tinker":
                await _serve_clients(bank, share, worker, lease, spec)
                return
            name = f"{lease.job}.{lease.epoch}"
            share.tokens = lambda: bank.passed[name]
            await _train_in(bank, name, worker, lease, spec)


async def _serve_clients(bank: BankLoop, share: CpuShare, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    from opentinker.services.trainer.tinker.tinker_job import TinkerJob

    job = TinkerJob(worker, lease, spec, bank)
    share.tokens = lambda: job.tokens
    try:
        await job.run()
    finally:
        worker.tell({})


async def _train_in(bank: BankLoop, name: str, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    from opentinker.services.trainer.bank.job_adapter import JobAdapter

    learner = _learners()[spec.kind](spec, JobAdapter(bank, name))
    try:
        if spec.kind == "rl":
            await TrainerJob(worker, lease, spec, learner).run()
        else:
            await SupervisedJob(worker, lease, spec, learner).run()
    finally:
        await finish_uncancelled(asyncio.to_thread(learner.close))
        worker.tell({})


def _learners() -> dict[str, type]:
    """Return learner classes by kind of job. Imports torch and transformers, which takes seconds: see `preload`."""
    from opentinker.services.trainer.bank.shared_learners import LEARNERS

    return LEARNERS
