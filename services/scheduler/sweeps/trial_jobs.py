"""Jobs of trials as the store has them: found under their idempotency keys, and cancelled."""

from __future__ import annotations

import contextlib

import msgspec
import structlog
from pydantic import ValidationError

from opentinker.services.scheduler.sweeps.messages import tell_end
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.sweeps import SweepState

log = structlog.get_logger()


def job_key(sweep: str, trial: int, job: int) -> str:
    """Return the idempotency key of a job. It has spaces, which no key of a request has."""
    return f"sweep {sweep} {trial} {job}"


async def submitted_job(ctx: Context, sweep: str, tenant: str, trial: int, job: int) -> str:
    """Return the job that was submitted under its key, or an empty text."""
    return await ctx.store.job_of_key(tenant, job_key(sweep, trial, job)) or ""


async def cancel_job(ctx: Context, job: str, reason: str, leader: int) -> None:
    """Cancel a job unless it has ended. Raises Fenced."""
    with contextlib.suppress(Conflict, NotFound):
        await ctx.store.transition(job, JobState.CANCELLED, reason=reason[:1000], leader=leader)
        await ctx.bus.emit(WAKE, {"job": job}, who="scheduler")


async def abandon(ctx: Context, store: SweepStore, sweep: str, reason: str, leader: int) -> None:
    """End a sweep that cannot continue, regardless of its record and trials, and cancel its jobs. Raises NotFound,
    Fenced."""
    await store.end(sweep, SweepState.FAILED, reason, leader=leader)
    tenant = await store.tenant(sweep)
    for trial, jobs in (await store.job_ids(sweep)).items():
        for place, known in enumerate(jobs):
            if id := known or await submitted_job(ctx, sweep, tenant, trial, place):
                await cancel_job(ctx, id, f"sweep {sweep} failed: {reason}", leader)
    try:
        await tell_end(ctx, await store.sweep(sweep))
    except (msgspec.MsgspecError, ValidationError) as error:  # its record is what is wrong
        log.warning("end_not_told", error=str(error))
    await store.ended(sweep, leader=leader)
