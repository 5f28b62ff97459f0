"""Env workers come and go by fours under a job: nothing is lost, and nobody who is there goes idle."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from opentinker.shared.types.core import Pool
from tests.conftest import until
from tests.support.cluster import Cluster, toy_cluster
from tests.support.factories import make_spec
from tests.support.lineage import faults

WORKERS = [f"env_worker-{number}" for number in range(4)]
GROUPS = 4


async def present(cluster: Cluster) -> set[str]:
    return {worker.id for worker in await cluster.store.workers() if worker.pool == Pool.ENV}


async def all_busy(cluster: Cluster) -> None:
    """Until each of them has had sessions, be it at different moments."""
    seen: set[str] = set()

    async def looked() -> bool:
        seen.update(w.id for w in await cluster.store.workers() if w.pool == Pool.ENV and w.detail.get("sessions"))
        return seen >= set(WORKERS)

    await until(looked)


@pytest.mark.slow
async def test_four_env_workers_become_one_and_four_again_and_no_group_is_lost(tmp_path: Path) -> None:
    """Episodes have several turns and are sticky: those of workers that drain end there, those of a killed one begin
    anew elsewhere. The job ends when it is told to, so that no step of the test has to be quick."""
    told = tmp_path / "told"
    async with toy_cluster(tmp_path, env_workers=4) as (cluster, model):
        spec = make_spec(
            model={"base": str(model)},
            environment={"name": "tests.samples.env_samples:UntilTold", "config": {"file": str(told)}},
            algorithm={"group_size": 4, "groups_per_batch": GROUPS, "max_staleness": 2},
            rollout={"engine": "toy", "max_turns": 4, "max_tokens": 16, "max_tokens_per_turn": 4,
                     "toy": {"seconds_per_token": 0.02}},
            train={"learner": "simulated", "steps": 10_000, "simulated_step_s": 0.05, "checkpoint_every": 10,
                   "target": {"told": 1.0}},
        )  # fmt: skip
        job = await cluster.submit(spec)
        await all_busy(cluster)

        drained = await asyncio.gather(*(cluster.stop(name) for name in WORKERS[1:3]))
        assert drained == [0, 0]
        assert all('"given_up":0' in cluster.logs(name) for name in WORKERS[1:3])
        assert await cluster.stop(WORKERS[3], signal.SIGKILL) == -signal.SIGKILL
        await until(lambda: present(cluster), lambda found: found == {WORKERS[0]})
        await cluster.reaches(job, await cluster.step(job) + 5)
        for name in WORKERS[1:]:
            cluster.start(name)
        await all_busy(cluster)
        await cluster.reaches(job, await cluster.step(job) + 5)

        told.touch()
        record = await cluster.succeeds(job)
        ledger, manifest = await cluster.ledger(job), cluster.manifest(job)
        assert ledger.balanced and ledger.failed == {}, ledger
        assert ledger.issued == ledger.accepted + ledger.running, ledger
        assert ledger.trained == record["step"] * GROUPS == manifest.ledger["trained"], ledger
        found = faults(cluster.lines(job), manifest.resumed, steps=record["step"], groups_per_batch=GROUPS,
                       max_staleness=2)  # fmt: skip
        assert found == []
        lives = {name: cluster.processes[name].starts for name in WORKERS}
        assert lives == dict(zip(WORKERS, (1, 2, 2, 2), strict=True))
