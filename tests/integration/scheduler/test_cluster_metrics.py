"""Metrics of the whole cluster, and the alert that rests on one."""

from __future__ import annotations

import re
import time
from pathlib import Path

import yaml

from opentinker.services.scheduler.jobs.scheduler_metrics import SchedulerMetrics
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import CLUSTER
from opentinker.shared.types.core import JobState
from tests.support.scheduling import new_job

ALERTS = Path(__file__).resolve().parents[3] / "deploy" / "observability" / "alerts.yml"


def alert_of(name: str) -> tuple[str, float]:
    """Return the metric of an alert, and the value above which it rings at once."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    (rule,) = [rule for group in groups for rule in group["rules"] if rule["alert"] == name]
    found = re.fullmatch(r'max\(opentinker_metric\{job="cluster",name="(.+)"\}\) > (\d+)', rule["expr"])
    assert found is not None and "for" not in rule
    return found[1], float(found[2])


async def test_the_alert_on_waiting_jobs_is_about_the_one_that_waits_longest(ctx: Context) -> None:
    metric, most = alert_of("JobsWait")
    measured = SchedulerMetrics(ctx)

    async def waits_s() -> float:
        await measured.measure()
        return measured.meters.of(CLUSTER).gauges[metric]

    async def waited(job: str, wait_s: float) -> None:
        await ctx.store.redis.hset(f"job:{job}", mapping={"since": time.time() - wait_s})

    assert await waits_s() == 0
    for _ in range(3):  # a busy queue
        await waited(await new_job(ctx.store), 920)
    assert await waits_s() == 900
    await waited(await new_job(ctx.store, state=JobState.RUNNING), 9_000)
    asleep = await new_job(ctx.store)
    await waited(asleep, 9_000)
    await ctx.store.redis.hset(f"job:{asleep}", mapping={"asleep": 1})
    assert await waits_s() < most
    await waited(await new_job(ctx.store), 3_700)
    assert await waits_s() > most
