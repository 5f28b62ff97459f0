"""Estimates what a sweep takes: its trials one by one, since the varied settings may change how long a job runs, as far
as its budgets allow."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence

import orjson

from opentinker.shared.api_types import JobEstimate
from opentinker.shared.prices import PriceSettings
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.sweeps.children import Settings, Sweep, child_of, draws
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.types.errors import SpecError, plural

ESTIMATED = 16
"""Combinations that are estimated; of more, so many drawn ones."""
UNTIMED = {"train.lr", "train.weight_decay", "train.warmup_steps", "rollout.temperature", "rollout.top_p"}
"""Settings by which no estimate goes: combinations that differ in nothing else are estimated once."""
UNCOUNTED = "an upper bound: early stopping, which is not counted, can only lower time and cost"
OfJob = Callable[[JobSpec], Awaitable[JobEstimate | None]]


async def estimate_sweep(prices: PriceSettings, sweep: Sweep, of_job: OfJob) -> JobEstimate | None:
    """Return what all jobs of a sweep take together, and one of them on average; None if nothing tells of any.

    `of_job`: estimates one job."""
    combinations = _combinations(sweep)
    found: dict[bytes, JobEstimate | None] = {}
    known: list[JobEstimate] = []
    for settings in combinations:
        key = orjson.dumps({path: value for path, value in settings.items() if path not in UNTIMED})
        if key not in found:
            found[key] = await _estimate_of(sweep, settings, of_job)
        if (one := found[key]) is not None:
            known.append(one)
    if not known:
        return None
    return _within_budget(prices, sweep, _mean(known, _said(sweep, combinations, known)))


def _combinations(sweep: Sweep) -> Sequence[Settings]:
    """Return the combinations to estimate: all, or some that stand for them. Those of `tpe` are not known before."""
    if not sweep.trials:
        return draws(sweep.table, min(ESTIMATED, sweep.most_trials))
    timed = {orjson.dumps([v for path, v in one.items() if path not in UNTIMED]) for one in sweep.trials}
    return sweep.trials if len(timed) <= ESTIMATED else random.Random(0).sample(sweep.trials, ESTIMATED)


async def _estimate_of(sweep: Sweep, settings: Settings, of_job: OfJob) -> JobEstimate | None:
    try:
        spec = parse_spec(child_of(sweep.table, sweep.base, settings, sweep.table.job_seeds[0]))
    except SpecError:  # a drawn combination that is only checked when its job is submitted
        return None
    return await of_job(spec)


def _mean(known: list[JobEstimate], basis: str) -> JobEstimate:
    """Return the estimate of a job that is the mean of these, but for its cost."""
    count = len(known)
    return {
        **known[0],
        "steps": round(sum(one["steps"] for one in known) / count),
        "seconds": sum(one["seconds"] for one in known) / count,
        "seconds_low": min(one["seconds_low"] for one in known),
        "seconds_high": max(one["seconds_high"] for one in known),
        "worker_s": sum(one["worker_s"] for one in known) / count,
        "gpu_s": sum(one["gpu_s"] for one in known) / count,
        "like": list(dict.fromkeys(id for one in known for id in one["like"])),
        "basis": basis,
    }


def _said(sweep: Sweep, combinations: Sequence[Settings], known: list[JobEstimate]) -> str:
    bases = list(dict.fromkeys(one["basis"] for one in known))
    said = bases[0]
    if len(bases) > 1 or len({one["seconds"] for one in known}) > 1:
        few = len(combinations) < sweep.most_trials
        said = f"{said}; the mean of {'some' if few else 'its'} {plural(len(known), 'combination')}"
    if missing := len(combinations) - len(known):
        said = f"{said}; nothing tells of {missing} others"
    return said


def _within_budget(prices: PriceSettings, sweep: Sweep, one: JobEstimate) -> JobEstimate:
    """Return the estimate of all jobs from that of one. The sweep ends at the first of its budgets: of hours, in which
    `max_running` jobs run at the same time, or of seconds of workers."""
    table, most = sweep.table, sweep.most_jobs
    together = min(table.max_running, most)
    ends = _ends(table, one, together)
    ended_by, rounds = min(ends, key=lambda end: end[1], default=("", math.inf))  # times that `together` jobs are run
    basis = one["basis"] if table.early_stopping is None else f"{one['basis']}; {UNCOUNTED}"
    jobs, done = most, float(most)
    if rounds * together < most:
        done = rounds * together
        jobs = min(most, together * math.ceil(rounds))
        basis = f"{basis}; {ended_by} ends it after about {plural(jobs, 'job')} of up to {most:,}, {together} at a time"
    part = min(1.0, rounds)  # of a job, where the first ones are cancelled
    return {
        **one,
        "jobs": jobs,
        "seconds": one["seconds"] * part,
        "seconds_low": min(one["seconds_low"], one["seconds"] * part),
        "seconds_high": one["seconds_high"] if part == 1.0 else one["seconds"] * part,
        "worker_s": one["worker_s"] * done,
        "gpu_s": one["gpu_s"] * done,
        "cost": prices.cost(one["worker_s"] * done, one["gpu_s"] * done),
        "basis": basis,
    }


def _ends(table: SweepTable, one: JobEstimate, together: int) -> list[tuple[str, float]]:
    """Return the budgets that are set, and how often as many jobs as run together are over until each is spent."""
    ends = []
    if table.max_hours is not None and one["seconds"]:
        ends.append((f"max_hours = {table.max_hours:g}", table.max_hours * 3600 / one["seconds"]))
    if table.max_worker_s is not None and one["worker_s"]:
        ends.append((f"max_worker_s = {table.max_worker_s:g}", table.max_worker_s / (one["worker_s"] * together)))
    return ends
