"""Policies that are adapters of one base, in places of one shared trainer: their weights, a kill, and the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from opentinker.services.trainer import checkpoint
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import ADAPTER
from tests.conftest import until
from tests.samples.seat_samples import BACKER, RIVAL
from tests.support.cluster import Cluster, shared_fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {"bank_jobs": 3, "bank_tokens": 512, "heartbeat_s": 0.5, "worker_ttl_s": 3}
"""A place too few for two jobs of two policies."""
POLICIES = ("first", "second")
STEPS = 6

cluster = shared_fixture(Cluster, **SETTINGS)


def game(
    base: Path, trainer: str, *, steps: int = STEPS, seconds: float = 0.002, max_staleness: int = 0, **changes: Any
) -> JobSpec:
    """What is played depends on the number of the match alone; the policies differ in rank, learning rate and batch."""
    policies = {
        "first": {"model": {"lora": {"rank": 4}}},
        "second": {
            "train": {"lr": 3e-4, "steps": 2 * steps, "checkpoint_every": 4},
            "algorithm": {"groups_per_batch": 1},
        },
    }
    spec: dict[str, Any] = {
        "name": "stakes",
        "model": {"base": str(base), "chat_template": "plain", "lora": {"rank": 8, "alpha": 16.0}},
        "environment": {"name": "tests.samples.seat_samples:SeededStakes"},
        "algorithm": {"group_size": 4, "groups_per_batch": 2, "max_staleness": max_staleness},
        "rollout": {"engine": "toy", "max_tokens": 8, "max_turns": 2, "seed": 7, "retries": 0}
        | {"toy": {"seconds_per_token": seconds}},
        "train": {"steps": steps, "lr": 1e-3, "checkpoint_every": 2},
        "policies": policies,
        "seats": {BACKER: "first", RIVAL: "second"},
        "resources": {"trainer": trainer},
    }
    return parse_spec({**spec, **changes})


def weights(cluster: Cluster, job: str, policy: str) -> Tensor:
    """The matrices that begin with zeros."""
    directory, _ = checkpoint.list_checkpoints(cluster.data / "jobs" / part_id(job, policy) / "checkpoints")[-1]
    found = load_file(directory / ADAPTER)
    return torch.cat([found[name].double().flatten() for name in sorted(found) if "lora_B" in name])


@asynccontextmanager
async def trainer_of_one_job(cluster: Cluster) -> AsyncIterator[None]:
    cluster.env["OPENTINKER_BANK_JOBS"] = "0"
    name = cluster.add("trainer")
    yield
    await cluster.stop(name)


async def check_ledgers(cluster: Cluster, job: str, spec: JobSpec) -> None:
    """Each policy trained every match that it took once, within its bound, and nothing is open."""
    for policy in POLICIES:
        ledger = await cluster.trained(job, spec, policy)
        assert ledger.running == ledger.pending == 0, (policy, ledger)


async def test_weights_are_those_of_policies_with_a_trainer_to_themselves(cluster: Cluster, small: Path) -> None:
    async with trainer_of_one_job(cluster):
        jobs = {trainer: await cluster.submit(game(small, trainer)) for trainer in ("own", "shared")}
        for trainer, job in jobs.items():
            await cluster.succeeds(job)
            await check_ledgers(cluster, job, game(small, trainer))
    for policy in POLICIES:
        own, shared = (weights(cluster, jobs[trainer], policy) for trainer in ("own", "shared"))
        gap = float((shared - own).norm() / own.norm())
        assert gap < 1e-3, (policy, gap)
        waits = [line["trainer/bank_wait_seconds"] for line in cluster.lines(part_id(jobs["shared"], policy))]
        assert len(waits) == (STEPS if policy == "first" else 2 * STEPS)


async def test_a_killed_process_costs_its_policies_repeated_work_and_nothing_else(
    cluster: Cluster, small: Path
) -> None:
    spec = game(small, "shared", steps=12, seconds=0.02, max_staleness=1)
    job = await cluster.submit(spec)
    await cluster.reaches(job, 3)
    workers = [worker for worker in await cluster.store.workers() if worker.job == job and worker.bank]
    assert len(workers) == 2 and len({worker.pid for worker in workers}) == 1
    cluster.kill("trainer-0")
    assert (await cluster.succeeds(job))["restarts"] == 1
    await check_ledgers(cluster, job, spec)
    for policy in POLICIES:
        resumed = cluster.manifest(part_id(job, policy)).resumed
        assert sorted(resumed) == [1, 2] and resumed[2] > 0, "from its checkpoint"


@pytest.mark.nightly
async def test_deterministic_policies_have_the_bits_of_a_trainer_to_themselves_also_after_a_kill(
    cluster: Cluster, small: Path
) -> None:
    train = {"steps": STEPS, "lr": 1e-3, "checkpoint_every": 2, "deterministic": True} | {"tokens_per_micro_batch": 512}
    async with trainer_of_one_job(cluster):
        whole = await cluster.run(game(small, "own", train=train))
    killed = await cluster.submit(game(small, "shared", seconds=0.02, train=train))
    await cluster.reaches(killed, 3)
    cluster.kill("trainer-0")
    assert (await cluster.succeeds(killed))["restarts"] == 1
    for policy in POLICIES:
        assert torch.equal(weights(cluster, killed, policy), weights(cluster, whole, policy)), policy


@pytest.mark.nightly
async def test_a_process_that_is_told_to_stop_saves_all_policies_and_members_of_their_pools(
    cluster: Cluster, small: Path
) -> None:
    spec = game(
        small,
        "shared",
        steps=12,
        seconds=0.02,
        environment={"name": "tests.samples.seat_samples:Deal"},
        seats={"dealer": "first", "left": "second", "right": {"pool": "past"}},
        pools={"past": {"policy": "second", "every": 2, "keep": 3}},
    )
    job = await cluster.submit(spec)
    await cluster.reaches(job, 3)
    await cluster.stop("trainer-0")
    saved = {policy: cluster.manifest(part_id(job, policy)) for policy in POLICIES}
    made = {policy: cluster.lines(part_id(job, policy))[-1]["step"] for policy in POLICIES}
    assert {policy: manifest.step for policy, manifest in saved.items()} == made, "no step is lost"
    assert saved["second"].pools["past"]
    cluster.start("trainer-0")
    await cluster.succeeds(job)
    await check_ledgers(cluster, job, spec)
    members = [str(member.version) for member in cluster.manifest(part_id(job, "second")).pools["past"]]
    assert members[-1].startswith("2.") and len(members) == 3


async def test_policies_wait_for_all_their_places_and_a_cancelled_job_returns_all(
    cluster: Cluster, small: Path
) -> None:
    running = await cluster.submit(game(small, "shared", steps=100_000, seconds=0.02))
    await cluster.runs(running)
    waiting = await cluster.submit(game(small, "shared"))

    async def reason() -> str:
        return str((await cluster.client.job(waiting))["waiting_for"])

    told = await until(reason, lambda text: "places" in text)
    assert "a free trainer for jobs that share" in told and "2 places of one process" in told
    assert f"held by rl job {running}" in told
    held = [lease.job for lease in await cluster.store.leases() if lease.worker.startswith("trainer-0.")]
    assert held == [running, running], "the third place is for others meanwhile"
    await cluster.client.cancel(running)
    await cluster.succeeds(waiting)
