"""Estimates the time, worker-seconds, GPU-seconds and price of a spec from a similar job that ran here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentinker.shared.api_types import JobEstimate
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.store import steps_of
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import plural

LOOKED_AT = 200
"""Newest jobs of the tenant among which one like it is looked for."""
FEWEST_STEPS = 3
"""Steps that a job must have done: starting up is more than the first ones."""


async def estimate(ctx: Context, spec: JobSpec, tenant: str, jobs: int = 1) -> JobEstimate | None:
    """Return what `jobs` jobs of this spec would take; None for one without an end, or if nothing like it ran here.

    A job is like it that has the same kind, model and environment. A step's time is taken to grow with its tokens.
    """
    plain = spec.model_dump(mode="json")
    steps = steps_of(plain)
    if spec.kind == "inference" or not steps:
        return None
    for job in await ctx.store.jobs_of(tenant, LOOKED_AT):
        if job.step < FEWEST_STEPS or not _is_like(job, plain):
            continue
        running_s = _running_s(await ctx.store.states(job.id), time.time())
        (spent,) = await UsageStore(ctx.store.redis).of_jobs([job.id])
        if running_s <= 0 or not spent["worker_s"]:
            continue
        larger = _step_size(plain) / _step_size(job.spec)
        more = steps / job.step * larger
        worker_s, gpu_s = spent["worker_s"] * more * jobs, spent["gpu_s"] * more * jobs
        cost = ctx.settings.cost(worker_s, gpu_s)
        sized = "" if larger == 1 else f", times {larger:.3g} for the size of a step"
        done = plural(job.step, "episode" if spec.kind == "eval" else "step")
        unit = "an episode" if spec.kind == "eval" else "a step"
        return {
            "jobs": jobs,
            "steps": steps,
            "seconds": running_s * more,
            "worker_s": worker_s,
            "gpu_s": gpu_s,
            "cost": cost,
            "currency": "" if cost is None else ctx.settings.price_currency,
            "like": job.id,
            "basis": f"{job.name} ({job.id}) took {running_s / job.step:.3g} s {unit} over {done}{sized}",
        }
    return None


def _is_like(job: JobRecord, plain: Mapping[str, Any]) -> bool:
    def subject(spec: Mapping[str, Any]) -> tuple[Any, ...]:
        environment = (spec.get("environment") or {}).get("name", "")
        trainer = (spec.get("train") or {}).get("learner")
        return spec["kind"], spec["model"]["base"], environment.partition("@")[0], trainer, bool(spec.get("policies"))

    return subject(job.spec) == subject(plain)


def _step_size(spec: Mapping[str, Any]) -> float:
    """Return the most tokens, or the rows, of a step, or the most tokens of an episode of an eval job."""
    if spec["kind"] == "eval":
        return float(spec["rollout"]["max_tokens"])
    if spec["kind"] != "rl":
        return float(spec["data"]["batch_size"])
    algorithm = spec["algorithm"]
    return float(algorithm["group_size"] * algorithm["groups_per_batch"] * spec["rollout"]["max_tokens"])


def _running_s(states: list[dict[str, Any]], now: float) -> float:
    """Return how long a job was running, by the events that changed its state."""
    total, since = 0.0, 0.0
    for event in states:
        if since:
            total += event["time"] - since
        since = event["time"] if event.get("state") == JobState.RUNNING else 0.0
    return total + (now - since if since else 0.0)
