"""Frozen models of some of a job's policies, end to end, with real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.types.core import part_id
from tests.conftest import until
from tests.integration.trainer.test_reward_models import make_judge
from tests.support.cluster import Cluster
from tests.support.toys import toy_game


@pytest.mark.slow
async def test_one_of_two_policies_has_a_reference(tmp_path: Path, small: Path) -> None:
    policies = {"speaker": {"algorithm": {"kl_coef": 0.1}}, "listener": {}}
    spec = toy_game(
        small,
        policies=policies,
        seats={name: name for name in policies},
        train={"steps": 3, "lr": 1e-2, "checkpoint_every": 3},
    )
    async with Cluster(tmp_path, references=1) as cluster:
        job = await cluster.run(spec)
        for name in policies:
            await cluster.trained(job, spec, name)
        divergence = [line["loss/kl"] for line in cluster.lines(part_id(job, "speaker"))]
        assert divergence == pytest.approx([0.0] * 3, abs=1e-6), "equal rewards leave the weights as they started"
        assert all("loss/kl" not in line for line in cluster.lines(part_id(job, "listener")))

        async def scored() -> int:
            """Of the last heartbeat."""
            return sum(int(w.detail["groups"]) for w in await cluster.store.workers() if w.pool == "reference")

        await until(scored, lambda groups: groups >= 6)  # every match that it trained


@pytest.mark.slow
async def test_a_reward_model_scores_one_of_two_policies_through_a_kill(tmp_path: Path, small: Path) -> None:
    judge = make_judge(small, tmp_path / "judge")
    policies: dict[str, dict[str, Any]] = {"speaker": {}, "listener": {}}
    spec = toy_game(
        small,
        policies=policies,
        seats={name: name for name in policies},
        reward_models=[{"base": str(judge), "name": "judge", "policies": ["speaker"]}],
        train={"steps": 6, "lr": 1e-3, "checkpoint_every": 2},
    )
    async with Cluster(tmp_path, references=1) as cluster:
        job = await cluster.submit(spec)
        await cluster.reaches(job, 2)
        cluster.kill("reference_forward-0")
        cluster.kill("trainer-0")
        await cluster.succeeds(job)
        for name in policies:
            await cluster.trained(job, spec, name)
        for line in cluster.lines(part_id(job, "speaker")):
            assert line["reward/mean"] == pytest.approx(line["reward/own"] + line["reward_model/judge/mean"], abs=1e-5)
        for line in cluster.lines(part_id(job, "listener")):
            assert not [name for name in line if name.startswith("reward_model/")] and "reward/own" not in line
