"""A job whose ranks two trainers share, and what becomes of it when one of them is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec
from tests.conftest import until
from tests.e2e.test_kills import check, toy_spec
from tests.support.cluster import Cluster

SETTINGS: dict[str, Any] = {"trainers": 2, "max_ranks": 1, "queue_gang_s": 2, "worker_ttl_s": 3, "heartbeat_s": 0.5}


def spec_of(model: Path, parallel: str = "data", **resources: int) -> JobSpec:
    train = {"steps": 10, "checkpoint_every": 3, "keep_checkpoints": 2, "parallel": parallel}
    return toy_spec(model, steps=10, train=train, resources={"trainer_ranks": 2, **resources})


async def events(cluster: Cluster, job: str, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in await cluster.store.events(job) if event["event"] in kinds]


def ranks_of(cluster: Cluster, job: str) -> dict[int, int]:
    """By epoch; only several ranks report how evenly they are used."""
    return {line["epoch"]: 2 if "trainer/rank_imbalance" in line else 1 for line in cluster.lines(job)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", ["zero2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("data", "zero1", "zero3"))]
)
async def test_a_job_on_two_trainers_continues_on_the_one_that_is_left(
    tmp_path: Path, small: Path, parallel: str
) -> None:
    async with Cluster(tmp_path, **SETTINGS) as cluster:
        spec = spec_of(small, parallel, min_trainer_ranks=1)
        job = await cluster.submit(spec)
        await cluster.reaches(job, 4)
        leases = {lease.worker: lease for lease in await cluster.store.leases() if lease.pool == "trainer"}
        assert leases.keys() == {"trainer-0", "trainer-1"}
        member = leases["trainer-0"].group[1].worker
        assert cluster.children(member), "it runs a rank"
        await cluster.stop(member, signal.SIGKILL)
        await cluster.succeeds(job)
        lost = await events(cluster, job, "rank_lost", "trainer_lost")
        assert lost[0]["event"] == "rank_lost" and lost[0]["worker"] == member, lost
        assert ranks_of(cluster, job)[1] == 2 and ranks_of(cluster, job)[max(ranks_of(cluster, job))] == 1
        assert max(cluster.manifest(job).resumed.values()) >= 3, "from its checkpoint"
        await check(cluster, job, spec)


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_job_that_needs_both_trainers_waits_for_them(tmp_path: Path, small: Path) -> None:
    """The lead is killed, and a rank of the member later; each comes back."""
    async with Cluster(tmp_path, **SETTINGS) as cluster:
        spec = spec_of(small)
        job = await cluster.submit(spec)
        await cluster.reaches(job, 4)
        (lead,) = {lease.group[0].worker for lease in await cluster.store.leases() if lease.group}
        cluster.kill(lead)
        await until(lambda: any(line["epoch"] == 2 for line in cluster.lines(job)), timeout_s=240)
        (member,) = {lease.group[1].worker for lease in await cluster.store.leases() if lease.group}
        (rank,) = cluster.children(member)
        os.kill(rank, signal.SIGKILL)
        await cluster.succeeds(job)
        assert set(ranks_of(cluster, job).values()) == {2}
        await check(cluster, job, spec)
        await until(lambda: all(not cluster.children(name) for name in ("trainer-0", "trainer-1")))


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_paused_job_of_two_trainers_saves_what_was_trained(tmp_path: Path, small: Path) -> None:
    """Under ZeRO the checkpoint needs both."""
    async with Cluster(tmp_path, **SETTINGS) as cluster:
        spec = toy_spec(
            small, steps=8, resources={"trainer_ranks": 2},
            train={"steps": 8, "checkpoint_every": 1000, "parallel": "zero3"},
        )  # fmt: skip
        job = await cluster.submit(spec)
        await cluster.reaches(job, 2)
        await cluster.client.pause(job)

        async def idle() -> bool:
            return all(w.job is None for w in await cluster.store.workers() if w.pool == "trainer")

        await until(idle, timeout_s=120)
        assert cluster.manifest(job).step >= 2
        await cluster.client.resume(job)
        await cluster.succeeds(job)
        await check(cluster, job, spec)
