"""Lends rollout workers that are left over to jobs that may have more than they need (`planner.py`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import groupby

from opentinker.services.scheduler.placement.gpu_matching import GpuMatcher
from opentinker.services.scheduler.placement.planner_state import RunningJob
from opentinker.services.scheduler.placement.types import AddWorker
from opentinker.shared.types.core import Pool

Order = tuple[int, float, int, float, str]
"""Priority, the tenant's share, rollout workers, age and id of a job: the first in order gets the next worker."""


def lend(borrowers: Iterable[RunningJob], left_over: Iterable[str], matcher: GpuMatcher) -> Iterator[AddWorker]:
    """Yield a decision for each worker lent, and count it for its borrower."""

    def order(one: RunningJob) -> Order:
        return -one.job.priority, one.tenant.total_share, one.has[Pool.ROLLOUT], one.job.created, one.job.id

    running = {one.job.id: one for one in borrowers}

    def first(turns: list[Order]) -> RunningJob | None:
        """Holdings of jobs and tenants only grow during a plan, so the first by current holdings is the first."""
        while turns:
            one = running[turns[0][-1]]
            most = one.tenant.limits.workers
            if one.has[Pool.ROLLOUT] >= one.job.most or (most is not None and sum(one.tenant.total.values()) >= most):
                heapq.heappop(turns)
            elif (now := order(one)) != turns[0]:
                heapq.heapreplace(turns, now)
            else:
                return one
        return None

    for kind, workers in groupby(left_over, matcher.kind):
        turns = [order(one) for one in running.values() if kind in matcher.suiting(one.job, Pool.ROLLOUT)]
        heapq.heapify(turns)
        for worker in workers:
            one = first(turns)
            if one is None:
                break
            yield AddWorker(one.job.id, worker, Pool.ROLLOUT)
            one.has[Pool.ROLLOUT] += 1
            one.tenant.total[Pool.ROLLOUT] += 1
