"""Jobs whose seats act at the same time, through all services: policies of their own, and a bot beside a policy."""

from __future__ import annotations

import math
from pathlib import Path

from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.e2e.policies.test_policies import POLICIES, check, game
from tests.support.cluster import toy_cluster

PENNIES = {"name": "matching_pennies", "config": {"rules": False}}
STEPS = 6


async def test_two_policies_learn_from_rounds_that_they_play_together(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        seats = {"even": "speaker", "odd": "listener"}
        spec = game(model, steps=STEPS, environment=PENNIES, policies={name: {} for name in POLICIES}, seats=seats)
        job = await cluster.submit(spec)
        record = await cluster.wait(job)
        assert record["state"] == "succeeded", record["reason"]
        await check(cluster, job, spec)
        totals = [math.fsum(line["reward/mean"] for line in cluster.lines(part_id(job, name))) for name in POLICIES]
        assert math.isclose(sum(totals), 0.0, abs_tol=1e-9), "what one wins the other loses, in every match"
        assert all(line["turns/mean"] == 1.0 for name in POLICIES for line in cluster.lines(part_id(job, name)))


async def test_a_policy_plays_rounds_against_a_bot(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        base = game(model, steps=STEPS, environment=PENNIES).model_dump(mode="json", exclude_unset=True)
        alone = {name: value for name, value in base.items() if name != "policies"}
        spec = parse_spec(alone | {"seats": {"odd": {"bot": "heads"}}})
        job = await cluster.submit(spec)
        record = await cluster.wait(job)
        assert record["state"] == "succeeded", record["reason"]
        lines = cluster.lines(job)
        assert len(lines) == STEPS and all(line["turns/mean"] == 1.0 for line in lines)
        assert not any("odd" in name for line in lines for name in line if name.startswith("reward/seat/"))
