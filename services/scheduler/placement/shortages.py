"""Counts and describes what a job lacks, as shown by `opentinker job JOB`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentinker.services.scheduler.placement.gpu_matching import GpuMatcher
from opentinker.services.scheduler.placement.planner_state import RunningJob
from opentinker.services.scheduler.placement.types import GB, NAMES, Counts, Need, PlannedJob
from opentinker.shared.types.core import ENDLESS, JobRecord, Pool

SHOWN_HOLDERS = 2
"""Holding jobs named to a waiting job's tenant."""
NOT_KEPT = (
    "no places are kept for it, since jobs without an end hold too many places of each process that is large enough"
)


def missing(needs: Counts, has: Counts) -> dict[Pool, int]:
    """Return missing workers by pool; `has` names every pool."""
    return {pool: n - has[pool] for pool, n in needs.items() if n > has[pool]}


def called(pool: Pool, need: Need | None = None, count: int = 1) -> str:
    """`trainer`, `rollout workers`, `trainer with 2 GPUs of 80 GB`; `need`: of each of them."""
    name = NAMES[pool] if count == 1 else f"{NAMES[pool]}s"
    return name if need is None else name + with_gpus(need)


def with_gpus(need: Need) -> str:
    """Describe the GPUs, the room, or the base that a worker needs; empty if none of them."""
    if need.base:
        together = f"; {need.places} places of one process" if need.places > 1 else ""
        memory = f"; with {need.memory / GB:g} GB" if need.memory else ""
        return f" for jobs that share {need.base} (setting bank_jobs{memory}{together})"
    if not need.gpus:
        return f" with room for {need.ranks} ranks" if need.ranks > 1 else ""
    count = "a GPU" if need.gpus == 1 else f"{need.gpus} GPUs"
    return f" with {count}" + (f" of {need.memory / GB:g} GB" if need.memory else "")


def in_words(
    short: Mapping[Pool, int],
    alive: Counts,
    absent: str = "",
    gpus: Mapping[Pool, Need] | None = None,
    holders: Mapping[Pool, str] | None = None,
) -> str:
    """Describe a shortage: `a free trainer and a free rollout worker (held by job j-1); env worker (none is running)`.
    `alive`: suitable workers; `gpus`: their requirements; `holders`: jobs that hold those that are not free."""
    gpus, holders = gpus or {}, holders or {}
    busy: dict[str, list[str]] = {}
    for pool, n in short.items():
        if alive.get(pool, 0):
            name = called(pool, gpus.get(pool), n)
            busy.setdefault(holders.get(pool, ""), []).append(f"a free {name}" if n == 1 else f"{n} more free {name}")
    held = [" and ".join(names) + (f" ({holder})" if holder else "") for holder, names in busy.items()]
    lack = [called(pool, gpus.get(pool)) for pool in short if not alive.get(pool, 0)]
    none = ", ".join(lack + ([absent] if absent else []))
    return "; ".join(held + ([f"{none} (none is running)"] if none else []))


def too_few(job: PlannedJob, alive: Counts, free: Counts, matcher: GpuMatcher) -> str:
    """Describe workers that are missing altogether; empty if all are there, free or not. `alive`, `free`: suitable
    ones."""
    small = missing(job.needs, alive)
    if not small and not job.absent:
        return ""
    few = [pool for pool in small if alive[pool]]
    counts = [
        f"{job.needs[p]} {called(p, job.gpus.get(p), job.needs[p])} ({alive[p]} of them running"
        f"{', as trainers that share a GPU count once' if matcher.divides_gpus(job, p) else ''})"
        for p in few
    ]
    rest = {pool: n for pool, n in missing(job.needs, free).items() if pool not in few}
    return joined(in_words(rest, alive, job.absent, job.gpus), *counts)


def held_by(jobs: Sequence[PlannedJob], pool: Pool, waiting: PlannedJob, lend_s: float = 0.0) -> str:
    """Describe which jobs hold the workers of a pool, and what to do about it, as the waiting job's tenant may read it.

    Empty if no job does. Only for inference jobs, which do not end by themselves, is there something to do. `lend_s`:
    seconds without requests after which one lends its workers to a job of the same or a higher priority; 0: never.
    """
    if not jobs:
        return ""
    own = [f"{job.kind} job {job.id}".strip() for job in jobs if job.tenant == waiting.tenant]
    if not own:
        return "held by " + ("a job of another tenant" if len(jobs) == 1 else f"{len(jobs)} jobs of other tenants")
    shown = own[:SHOWN_HOLDERS]
    if rest := len(jobs) - len(shown):
        shown.append(f"{rest} more")
    text = f"held by {' and '.join(shown)}"
    endless = [job for job in jobs if job.tenant == waiting.tenant and job.kind in ENDLESS]
    if endless:
        text += f"; cancel {'it' if len(jobs) == 1 else 'one'} or add a {NAMES[pool]}"
    if lend_s and any(job.kind == "inference" and job.priority <= waiting.priority for job in endless):
        text += f"; an inference job lends its workers after {lend_s:g} s without requests"
    return text


class HolderTexts:
    """`held_by` for the jobs that wait, computed once for those of a tenant and priority with the same need."""

    def __init__(self, begun: Mapping[str, RunningJob], matcher: GpuMatcher, lend_s: float) -> None:
        self._begun, self._matcher, self._lend_s = begun, matcher, lend_s
        self._texts: dict[tuple[str, int, Pool, Need | None], str] = {}

    def of(self, job: PlannedJob, pool: Pool) -> str:
        key = job.tenant, job.priority, pool, job.gpus.get(pool)
        if key not in self._texts:
            those = [one.job for one in self._begun.values() if self._matcher.those(one.holds(pool), job, pool)]
            self._texts[key] = held_by(those, pool, job, self._lend_s)
        return self._texts[key]


def next_try(job: PlannedJob) -> str:
    return f"another try at {time.strftime('%H:%M:%S', time.gmtime(job.retry_at))} UTC, after its last failure"


def joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def named(job: PlannedJob | JobRecord, tenant: str) -> str:
    """Return a job's id, or a neutral phrase if the job belongs to another tenant."""
    return job.id if job.tenant == tenant else "a job of another tenant"
