"""Serves a trainer process whose jobs share a base model (setting `bank_jobs`)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from opentinker.services.trainer.cpu_shares import CpuShare
from opentinker.services.trainer.job_training import close, train
from opentinker.services.trainer.shared_base import SharedBase
from opentinker.shared.asyncio_tools import gather_all
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.spec.matches.policies import spec_of
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
            await _work(shared, worker, lease, spec)

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


async def _work(shared: SharedBase, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    base = bank_of(spec.model_dump())
    if not base:
        raise JobFailed("resources.trainer is 'own', and this trainer shares its base; set bank_jobs = 0 for it")
    worker.tell({"base": base})
    try:
        if not lease.leads:
            await worker.status("ready", job=lease.job, epoch=lease.epoch)
            await shared.until_ended(lease)
            return
        with shared.leading(lease), shared.cpu.job(worker.ctx.worker) as share:
            async with shared.bank_for(lease.job, spec) as bank:
                await _serve_or_train(bank, share, worker, lease, spec)
    finally:
        worker.tell({})


async def _serve_or_train(bank: BankLoop, share: CpuShare, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    if spec.kind == "tinker":
        await _serve_clients(bank, share, worker, lease, spec)
    else:
        await _train(bank, share, worker, lease, spec)


async def _serve_clients(bank: BankLoop, share: CpuShare, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    from opentinker.services.trainer.tinker.tinker_job import TinkerJob

    job = TinkerJob(worker, lease, spec, bank)
    share.tokens = lambda: job.tokens
    await job.run()


async def _train(bank: BankLoop, share: CpuShare, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    """Train each policy of the job with an adapter, which is a tenant of the bank."""
    from opentinker.services.trainer.bank.job_adapter import JobAdapter

    names = {policy: ".".join(filter(None, [lease.job, str(lease.epoch), policy])) for policy in spec.policies or ("",)}
    share.tokens = lambda: int(sum(bank.passed[name] for name in names.values()))
    async with AsyncExitStack() as held:
        held.enter_context(bank.other_jobs.one_job(names.values()))
        learners = {}
        for policy, name in names.items():
            learners[policy] = _learners()[spec.kind](spec_of(spec, policy), JobAdapter(bank, name))
            held.push_async_callback(close, learners[policy])
        await train(worker, lease, spec, learners)


def _learners() -> dict[str, type]:
    """Return learner classes by kind of job. Imports torch and transformers, which takes seconds: see `preload`."""
    from opentinker.services.trainer.bank.shared_learners import LEARNERS

    return LEARNERS
