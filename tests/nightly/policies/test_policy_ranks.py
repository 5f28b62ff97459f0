"""A policy of two ranks beside one of a single rank: a job that loses a rank ends with the weights of one that has one
rank for each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import name_of
from tests.conftest import until
from tests.support.cluster import Cluster

POLICIES = ("speaker", "listener")
STEPS, EVERY = 8, 3
LARGEST_GAP = 1e-3
"""Between weights, as a share of the way that they have gone."""

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


def game(model: Path, ranks: int) -> JobSpec:
    """The toy engine samples by its seed alone, so that both jobs play the same matches."""
    spec: dict[str, Any] = {
        "name": "ranks",
        "model": {"base": str(model), "chat_template": "plain"},
        "environment": {"name": "signalling", "config": {"rules": False}},
        "algorithm": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 0, "drop_zero_variance": False},
        "rollout": {"engine": "toy", "max_tokens": 4, "seed": 7, "toy": {"seconds_per_token": 0.005}},
        "train": {"steps": STEPS, "lr": 1e-3, "checkpoint_every": EVERY, "deterministic": True},
        "policies": {"speaker": {"trainer_ranks": ranks}, "listener": {"train": {"lr": 5e-4}}},
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    return parse_spec(spec)


def weights(cluster: Cluster, job: str, policy: str, step: int) -> torch.Tensor:
    root = cluster.data / "jobs" / part_id(job, policy) / "checkpoints"
    saved = load_file(root / name_of(step) / "model.safetensors")
    return torch.cat([saved[name].double().flatten() for name in sorted(saved)])


async def test_a_job_whose_policies_have_two_ranks_and_one_goes_on_when_a_rank_is_killed(
    tmp_path: Path, tiny: Path
) -> None:
    async with Cluster(tmp_path, worker_ttl_s=60) as cluster:
        expected = await cluster.run(game(tiny, 1))
        job = await cluster.submit(game(tiny, 2))
        roots = [cluster.data / "jobs" / part_id(job, name) / "checkpoints" for name in POLICIES]
        await until(lambda: all((root / name_of(EVERY)).exists() for root in roots))
        (rank,) = cluster.children("trainer-0")
        os.kill(rank, signal.SIGKILL)
        await cluster.succeeds(job)
        assert "killed by signal 9" in cluster.logs("trainer-0")
        for name in POLICIES:
            manifest = cluster.manifest(part_id(job, name))
            assert manifest.step == STEPS and manifest.resumed[2] >= EVERY
            lines = cluster.lines(part_id(job, name))
            assert all(("trainer/rank_imbalance" in line) == (name == "speaker") for line in lines)
            early, late = (weights(cluster, expected, name, step) for step in (EVERY, STEPS))
            gap, way = (weights(cluster, job, name, STEPS) - late).norm(), (late - early).norm()
            assert way > 0 and gap < LARGEST_GAP * way, (name, float(gap / way))
        await until(lambda: cluster.children("trainer-0") == [])
