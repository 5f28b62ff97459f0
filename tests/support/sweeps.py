"""Sweeps whose jobs are played by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentinker.shared import api_types
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.support.api import SPEC, Http, fits
from tests.support.factories import make_point

SKILLS = [0.1, 0.4, 0.7]
SKILL = "rollout.toy.skill"


def swept(**table: Any) -> dict[str, Any]:
    return {**SPEC, "sweep": {"parameters": {"rollout": {"toy": {"skill": SKILLS}}}, **table}}


def skill(spec: dict[str, Any]) -> float:
    return float(spec["rollout"]["toy"]["skill"])


async def jobs_of(http: Http, sweep: str) -> list[dict[str, Any]]:
    """Its jobs, in order."""
    _, page = await http("GET", f"/v1/jobs?tag={sweep}&sort=-created")
    return list(page["jobs"])


async def submitted(http: Http, **table: Any) -> str:
    status, sweep = await http("POST", "/v1/sweeps", json=swept(**table))
    assert status == 201, sweep
    fits(sweep, api_types.SweepSummary)
    return str(sweep["id"])


async def play(
    ctx: Context, job: str, curve: list[float], state: JobState = JobState.SUCCEEDED, first: int = 1
) -> None:
    """Act as a trainer: report a point per step, and end."""
    if state is JobState.RUNNING:
        await ctx.store.transition(job, state)
    for step, value in enumerate(curve, first):
        point = make_point(job, step, {"reward/mean": value})
        await ctx.bus.publish(METRIC, point, f"{job}/{step}", job=job, source="trainer")
    if state.final:
        await ctx.store.transition(
            job, state, step=first + len(curve) - 1, reason="" if state == "succeeded" else "boom"
        )


async def ends(http: Http, sweep: str) -> dict[str, Any]:
    _, over = await until(lambda: http("GET", f"/v1/sweeps/{sweep}"), lambda found: found[1]["state"] != "running")
    fits(over, api_types.Sweep)
    return dict(over)


async def play_all(
    ctx: Context,
    http: Http,
    sweep: str,
    score: Callable[[dict[str, Any]], list[float]],
    state: JobState = JobState.SUCCEEDED,
) -> dict[str, Any]:
    """Play jobs as they come, each to this state, until the sweep ends."""
    played: set[str] = set()

    async def read() -> dict[str, Any]:
        for job in await jobs_of(http, sweep):
            if job["id"] not in played and job["state"] == "queued":
                played.add(job["id"])
                spec = (await ctx.store.job(job["id"])).spec
                await play(ctx, job["id"], score(spec), state)
        return dict((await http("GET", f"/v1/sweeps/{sweep}"))[1])

    return dict(await until(read, lambda one: one["state"] != "running"))
