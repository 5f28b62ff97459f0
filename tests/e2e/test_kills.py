"""Every process and both servers killed at random moments: the job ends well by itself, and nothing is lost or doubled.

The seed of a run is printed; OPENTINKER_KILL_SEED repeats it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from tests.conftest import until
from tests.support.cluster import SERVERS, Cluster, toy_cluster
from tests.support.factories import make_spec
from tests.support.lineage import faults, lineage

SERVICES = ("trainer-0", "rollout_worker-0", "env_worker-0", "scheduler")
GROUPS_PER_BATCH = 4
STEP_S = 0.08
LONGEST_PAUSE_S = 1.9
"""Between two kills."""


def seed() -> int:
    """Of this run; printed, so that a failure can be repeated."""
    chosen = int(os.environ.get("OPENTINKER_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"OPENTINKER_KILL_SEED={chosen}")
    return chosen


def toy_spec(model: Path, *, steps: int, **changes: Any) -> JobSpec:
    """About ten steps a second when nothing is killed; a checkpoint each second."""
    fields: dict[str, Any] = {
        "algorithm": {"group_size": 2, "groups_per_batch": GROUPS_PER_BATCH, "max_staleness": 2},
        "rollout": {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.01}},
        "train": {"learner": "simulated", "steps": steps, "simulated_step_s": STEP_S, "checkpoint_every": 10},
    }
    return make_spec(model={"base": str(model)}, **{**fields, **changes})


async def check(cluster: Cluster, job: str, spec: JobSpec) -> None:
    """Nothing lost, nothing trained twice, no version left out, and all evaluations of equal weights alike."""
    ledger, manifest, steps = await cluster.trained(job, spec), cluster.manifest(job), spec.train.steps
    # The last versions need nobody: the job ends whether or not they have reached the rollout workers.
    oldest = steps - 1 - spec.algorithm.max_staleness
    assert WeightVersion(max(manifest.resumed), oldest) <= ledger.version <= WeightVersion(manifest.epoch, steps), (
        ledger
    )
    if spec.validation is not None:
        evaluated = {line["step"]: line for line in cluster.lines(job, "validation.jsonl")}
        whole = [step for step, line in evaluated.items() if not line["val/missing"] and not line["val/failed"]]
        assert steps in whole, evaluated
        values = {line["val/reward/mean"] for step, line in evaluated.items() if step in whole}
        assert len(values) == 1, "the same start states, whoever was killed, and the toy learns nothing"


async def harm(cluster: Cluster, job: str, random_: random.Random, names: tuple[str, ...], kills: int) -> int:
    """Kill the processes in turn, in a random order and at random moments, until it is enough or the job is over."""
    order = random_.sample(names, len(names))
    for done in range(kills):
        await asyncio.sleep(random_.uniform(0.3, LONGEST_PAUSE_S))
        if "succeeded" in (await cluster.store.job(job)).state:
            return done
        name = order[done % len(order)]
        print(f"{time.strftime('%X')} kill {name} at step {await cluster.step(job)}")
        cluster.kill(name)
    return kills


async def survives(cluster: Cluster, spec: JobSpec, *, seed: int, kills: int, names: tuple[str, ...]) -> None:
    """The job ends well although every one of the processes was killed meanwhile."""
    assert spec.train.steps * STEP_S > len(names) * LONGEST_PAUSE_S, "the job could end before everybody's turn"
    job = await cluster.submit(spec)
    await cluster.reaches(job, 1)
    done = await harm(cluster, job, random.Random(seed), names, kills)
    print(f"{done} kills")
    await cluster.succeeds(job)
    assert {name for name in names if -signal.SIGKILL in cluster.processes[name].exits} == set(names)
    await check(cluster, job, spec)


async def test_job_survives_kills_of_its_services(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        spec = toy_spec(model, steps=100, validation={"every": 9, "episodes": 12})
        await survives(cluster, spec, seed=seed(), kills=5, names=SERVICES)


@pytest.mark.nightly
@pytest.mark.slow
async def test_job_survives_kills_of_reference_forward(tmp_path: Path, tiny: Path) -> None:
    """Groups that a killed instance had in hand come again; its model is loaded anew."""
    algorithm = {"group_size": 2, "groups_per_batch": GROUPS_PER_BATCH, "max_staleness": 2, "kl_coef": 0.05}
    async with Cluster(tmp_path, references=1) as cluster:
        spec = toy_spec(tiny, steps=60, algorithm=algorithm)
        await survives(cluster, spec, seed=seed(), kills=2, names=("reference_forward-0", "rollout_worker-0"))
        (scored,) = [int(w.detail["groups"]) for w in await cluster.store.workers() if w.pool == "reference"]
        assert scored > 0, "by the second life"


@pytest.mark.nightly
@pytest.mark.slow
async def test_job_survives_kills_of_everything(tmp_path: Path) -> None:
    names = (*SERVICES, *SERVERS, "trainer-1", "rollout_worker-1", "env_worker-1")
    async with toy_cluster(tmp_path, trainers=2, rollout_workers=2, env_workers=2) as (cluster, model):
        await survives(cluster, toy_spec(model, steps=250), seed=seed(), kills=15, names=names)


@pytest.mark.nightly
@pytest.mark.slow
async def test_job_of_two_ranks_goes_on_from_its_checkpoint_when_one_is_killed(tmp_path: Path, tiny: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        train = {"steps": 10, "checkpoint_every": 3, "keep_checkpoints": 2, "parallel": "zero3"}
        spec = toy_spec(tiny, steps=10, train=train, resources={"trainer_ranks": 2})
        job = await cluster.submit(spec)
        await cluster.reaches(job, 4)
        (rank,) = cluster.children("trainer-0")
        os.kill(rank, signal.SIGKILL)
        await cluster.succeeds(job)
        assert "RankLost" in cluster.logs("trainer-0") and "killed by signal 9" in cluster.logs("trainer-0")
        assert cluster.manifest(job).resumed[2] >= 3
        assert all(line["trainer/rank_imbalance"] < 2 for line in cluster.lines(job))
        await check(cluster, job, spec)
        await until(lambda: cluster.children("trainer-0") == [])


@pytest.mark.slow
async def test_nothing_is_lost_while_nats_and_redis_are_away(tmp_path: Path) -> None:
    """For longer than a heartbeat lasts."""
    async with toy_cluster(tmp_path, worker_ttl_s=2, heartbeat_s=0.4) as (cluster, model):
        spec = toy_spec(model, steps=80)
        job = await cluster.submit(spec)
        await cluster.reaches(job, 10)
        for server in SERVERS:
            await cluster.stop(server)
        await asyncio.sleep(3)  # the outage itself: longer than worker_ttl_s, and there is no server to ask
        for server in SERVERS:
            cluster.start(server)
        step = cluster.lines(job)[-1]["step"]
        await cluster.reaches(job, step + 5)
        await cluster.succeeds(job)
        await check(cluster, job, spec)


async def test_trainer_that_slept_beyond_its_lease_writes_nothing_more(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path, trainers=2, worker_ttl_s=4, heartbeat_s=0.4) as (cluster, model):
        spec = toy_spec(model, steps=10_000)
        job = await cluster.submit(spec)
        await cluster.reaches(job, 15)
        (first,) = [w.id for w in await cluster.store.workers() if w.job == job and w.pool == "trainer"]
        cluster.pause(first)
        await until(lambda: cluster.lines(job)[-1]["epoch"] == 2)
        cluster.resume(first)
        await until(
            cluster.store.workers,
            lambda found: any(w.id == first and w.job is None and w.status == "idle" for w in found),
        )
        await until(lambda: cluster.manifest(job).epoch == 2)
        epochs = [line["epoch"] for line in cluster.lines(job)]
        assert epochs == sorted(epochs), "a line of epoch 1 after one of epoch 2"
        manifest = cluster.manifest(job)
        assert manifest.resumed.keys() == {1, 2} and manifest.resumed[2] in (10, 20)
        kept = lineage(cluster.lines(job), manifest.resumed)
        assert [line["step"] for line in kept] == list(range(1, len(kept) + 1))
        ledger = await cluster.ledger(job)
        assert ledger.balanced and ledger.version.epoch == 2
        await cluster.client.cancel(job)


# --- the oracle itself ----------------------------------------------------------------------------------------------


def planted() -> list[dict[str, Any]]:
    """Epoch 1 made steps 1-5, epoch 2 went on from 3, epoch 3 died before its first checkpoint, epoch 4 from 6."""

    def line(epoch: int, step: int, seqs: list[int]) -> dict[str, Any]:
        return {"epoch": epoch, "step": step, "seqs": seqs, "staleness/max": 1.0}

    first = [line(1, step, [10 * step, 10 * step + 1]) for step in range(1, 6)]
    second = [line(2, step, [10 * step + 1, 10 * step + 2]) for step in range(4, 9)]
    third = [line(3, 7, [71, 72])]
    fourth = [line(4, step, [10 * step + 1, 10 * step + 2]) for step in range(7, 11)]
    return [*first, *second, *third, *fourth]


RESUMED = {1: 0, 2: 3, 4: 6}


def found(lines: list[dict[str, Any]]) -> list[str]:
    return faults(lines, RESUMED, steps=10, groups_per_batch=2, max_staleness=2)


def test_oracle_accepts_a_lineage_with_rolled_back_steps() -> None:
    assert found(planted()) == []
    assert [line["epoch"] for line in lineage(planted(), RESUMED)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4]


def test_oracle_finds_planted_faults() -> None:
    lines = planted()
    assert found([line for line in lines if (line["epoch"], line["step"]) != (2, 5)]) == ["step 5 was made 0 times"]
    assert "step 2 was made 2 times" in found([*lines, lines[1]])
    doubled = [*lines[:-1], {**lines[-1], "seqs": [101, 20]}]
    assert found(doubled) == ["group 20 was trained 2 times"]
    assert found([*lines[:-1], {**lines[-1], "seqs": [101]}]) == ["step 10 has 1 groups"]
    assert found([*lines[:-1], {**lines[-1], "staleness/max": 3.0}]) == ["step 10 has staleness 3.0"]
    beyond = {"epoch": 4, "step": 11, "seqs": [111, 112], "staleness/max": 0.0}
    assert found([*lines, beyond]) == ["step 11 is beyond the end"]
