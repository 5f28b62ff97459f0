"""Fairness in the long run: while every tenant has jobs waiting, what it has of the cluster goes by its weight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Pool
from tests.support.placement.cluster import ROLLOUT, TRAINER
from tests.support.placement.model import Model

RUN_S = 100.0
"""Of a job, in the mean; whose it is makes no difference."""
WAITING = 3
"""Jobs of each tenant, at every moment."""
ONE = ({TRAINER: 1, ROLLOUT: 1},)
MIXED = (*ONE, *ONE, {TRAINER: 1, ROLLOUT: 2}, {TRAINER: 1, ROLLOUT: 4})
WEIGHTS = [(3, 2, 1), (1, 1, 4), (2, 1, 1, 1)]


class Saturated(Model):
    """Jobs that end are followed by others of the same tenant; workers are lost and come back meanwhile."""

    def __init__(
        self, pools: Mapping[Pool, int], sizes: Sequence[Mapping[Pool, int]], weights: Sequence[float]
    ) -> None:
        limits = {name: TenantLimits(weight=weight) for name, weight in zip("abcd", weights, strict=False)}
        super().__init__(random.Random(0), pools, limits, list(limits))
        self.sizes = sizes
        self.had = dict.fromkeys(limits, 0.0)
        """By tenant, its share of the cluster times seconds."""
        self.began = self.now

    def event(self) -> None:
        begun = [job for job in self.jobs.values() if job.held]
        step = self.random.expovariate(max(1, len(begun)) / RUN_S)
        for name, tenant in self.tenants.items():
            self.had[name] += step * max(n / self.alive(pool) for pool, n in tenant.least.items())
        self.pass_time(step)
        if begun:
            self.leave(self.random.choice(begun))
        if self.random.random() < 0.1:
            self.random.choice((self._crash, self._revive, self._revive, self._expire))()
        waiting = Counter(job.tenant for job in self.jobs.values() if not job.held)
        for name in self.tenants:
            for _ in range(WAITING - waiting[name]):
                needs = self.random.choice(self.sizes)
                self.submit(name, needs, most=self.random.choice((needs[ROLLOUT], 6)))

    def alive(self, pool: Pool) -> int:
        return max(1, sum(worker.alive for worker in self.workers.values() if worker.pool == pool))

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the share of each tenant, and the share due to it by its weight."""
        for number in range(900):
            self.event()
            self.look()
            if number == 100:  # it is full
                self.began = self.now
                self.had = dict.fromkeys(self.tenants, 0.0)
        had = {name: seconds / (self.now - self.began) for name, seconds in self.had.items()}
        weights = {name: tenant.limits.weight for name, tenant in self.tenants.items()}
        total, weight = sum(had.values()), sum(weights.values())
        assert total > 0.75, "it is full"
        return had, {name: total * own / weight for name, own in weights.items()}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_long_run_share_of_a_full_cluster_goes_by_weight(weights: Sequence[float]) -> None:
    had, due = Saturated({TRAINER: 100, ROLLOUT: 100}, ONE, weights).shares()
    assert had == pytest.approx(due, rel=0.05)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_with_few_workers_and_jobs_of_all_sizes_it_does_within_one_job(weights: Sequence[float]) -> None:
    """Who holds least for its weight has the turn: a light tenant gets its one job rather than none."""
    had, due = Saturated({TRAINER: 24, ROLLOUT: 32}, MIXED, weights).shares()
    of_a_job = sum(size[ROLLOUT] for size in MIXED) / len(MIXED) / 32
    assert had == pytest.approx(due, abs=of_a_job)
