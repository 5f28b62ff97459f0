"""Estimates the time, worker-seconds, GPU-seconds and price of a spec from similar jobs that ran here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from opentinker.services.scheduler.placement.measured_jobs import (
    FEWEST_STEPS,
    MOST,
    Measured,
    machinery_of,
    of_setup,
    setup_of,
    step_size,
    subject_of,
)
from opentinker.shared.api_types import JobEstimate
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import plural

LOOKED_AT = 200
"""Newest jobs of the tenant among which similar ones are looked for."""


async def estimate(ctx: Context, spec: JobSpec, steps: int, tenant: str) -> JobEstimate | None:
    """Return what a job of this spec would take: the median of similar jobs, for the size of its steps; None for one
    without an end, or if nothing like it ran here. `steps`: of the job, 0 if they are not known.

    Jobs of as many workers and ranks count, with an adapter or without as it. Where there are none, others are scaled
    by what earlier jobs say of the difference.
    """
    plain = spec.model_dump(mode="json")
    if spec.kind in ("inference", "tinker") or not steps:
        return None
    found = await _newest(ctx, tenant)
    like = [job for job in found if subject_of(job.spec) == subject_of(plain)]
    wanted = setup_of(plain)
    same = await _measured(ctx, [job for job in like if setup_of(job.spec) == wanted][:MOST])
    if same:
        return _estimate_of(ctx, plain, steps, same, 1.0, "")
    if not like:
        return None
    others = await _measured(ctx, [job for job in found if job.kind == spec.kind])
    chosen = await asyncio.to_thread(of_setup, others, subject_of(plain), wanted)
    return None if chosen is None else _estimate_of(ctx, plain, steps, *chosen)


async def measured_beside(ctx: Context, spec: JobSpec, tenant: str) -> list[Measured]:
    """Return what the newest jobs of this kind took, with any model and environment, on workers of this sort."""
    wanted = machinery_of(spec.model_dump(mode="json"))
    return await _measured(ctx, [job for job in await _newest(ctx, tenant) if machinery_of(job.spec) == wanted][:MOST])


async def _newest(ctx: Context, tenant: str) -> list[JobRecord]:
    return [job for job in await ctx.store.jobs_of(tenant, LOOKED_AT) if job.step >= FEWEST_STEPS]


async def _measured(ctx: Context, jobs: list[JobRecord]) -> list[Measured]:
    """Return those jobs of which times are known, in their order."""
    states = await ctx.store.states_of([job.id for job in jobs])
    spent = await UsageStore(ctx.store.redis).of_jobs([job.id for job in jobs])
    now, found = time.time(), []
    for job, events, used in zip(jobs, states, spent, strict=True):
        running_s, done = _running_s(events, now), job.step * step_size(job.spec)
        if running_s > 0 and used["worker_s"]:
            spans = running_s / done, used["worker_s"] / done, used["gpu_s"] / done
            found.append(Measured(job, subject_of(job.spec), setup_of(job.spec), *spans))
    return found


def _estimate_of(
    ctx: Context, plain: Mapping[str, Any], steps: int, like: list[Measured], factor: float, scaled: str
) -> JobEstimate:
    """`factor`: by which their steps are longer; `scaled` says why."""
    done, wanted = steps * step_size(plain), setup_of(plain)
    seconds = sorted(one.seconds * done * factor for one in like)
    worker_s = median(one.worker_s * done * factor * wanted.workers / one.setup.workers for one in like)
    gpu_s = median(one.gpu_s * done * factor * wanted.more_gpus(one.setup) for one in like)
    cost = ctx.settings.cost(worker_s, gpu_s)
    larger = {step_size(plain) / step_size(one.job.spec) for one in like}
    sized = "" if larger == {1.0} else ", scaled to the size of a step"
    if len(larger) == 1 and larger != {1.0}:
        sized = f", times {min(larger):.3g} for the size of a step"
    return {
        "jobs": 1,
        "steps": steps,
        "seconds": median(seconds),
        "seconds_low": seconds[0],
        "seconds_high": seconds[-1],
        "worker_s": worker_s,
        "gpu_s": gpu_s,
        "cost": cost,
        "currency": "" if cost is None else ctx.settings.price_currency,
        "like": [one.job.id for one in like],
        "basis": f"{_said(like, seconds)}{sized}{scaled}",
    }


def _said(like: list[Measured], seconds: list[float]) -> str:
    if len(like) > 1:
        return f"median of {len(like)} jobs like it, {_range(seconds[0], seconds[-1])}"
    job, is_eval = like[0].job, like[0].job.kind == "eval"
    done, unit = plural(job.step, "episode" if is_eval else "step"), "an episode" if is_eval else "a step"
    return f"{job.name} ({job.id}) took {like[0].seconds * step_size(job.spec):.3g} s {unit} over {done}"


def _range(low: float, high: float) -> str:
    """Return `3.1 to 4 min`."""
    size, unit = next((size, unit) for size, unit in ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s")) if
                      high >= 2 * size or unit == "s")  # fmt: skip
    first, last = f"{low / size:.3g}", f"{high / size:.3g}"
    return f"{first} {unit} each" if first == last else f"{first} to {last} {unit}"


def _running_s(states: list[dict[str, Any]], now: float) -> float:
    """Return how long a job was running, by the events that changed its state."""
    total, since = 0.0, 0.0
    for event in states:
        if since:
            total += event["time"] - since
        since = event["time"] if event.get("state") == JobState.RUNNING else 0.0
    return total + (now - since if since else 0.0)
