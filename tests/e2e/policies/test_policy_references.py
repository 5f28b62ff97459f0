"""A job of two policies of which one alone has a reference, end to end, with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from opentinker.shared.types.core import part_id
from tests.conftest import until
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
