"""One policy on both seats of a game, then two, with rewards of teams and running baselines, through all services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker.client import ApiError
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import part_id
from tests.support.cluster import Cluster
from tests.support.factories import make_spec
from tests.support.lineage import undocumented

ENVIRONMENT = "tests.samples.seat_samples:Duel"
"""Zero-sum: the mean reward of both seats is 0."""


def duel(model: Path, changes: dict[str, Any] | None = None, **algorithm: Any) -> JobSpec:
    team = {"team": {"both": ["first", "sec*"]}, "team_weight": 0.25}
    return make_spec(
        model={"base": str(model)},
        environment={"name": ENVIRONMENT, "config": {"rounds": 2}},
        algorithm={"name": "spiral", "group_size": 1, "groups_per_batch": 4, **team, **algorithm},
        rollout={"engine": "toy", "max_tokens": 16, "max_turns": 2, "max_tokens_per_turn": 8},
        train={"learner": "torch", "steps": 3},
        **(changes or {}),
    )


@pytest.mark.nightly
async def test_seats_are_compared_with_their_own_past_and_paid_for_their_team(tmp_path: Path, tiny: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        with pytest.raises(ApiError, match=r"(?s)algorithm\.team\.both.*third.*no such seat"):
            await cluster.submit(duel(tiny, team={"both": ["first", "third"]}))
        job = await cluster.run(duel(tiny))
        for line in cluster.lines(job):
            assert line["reward/team/both"] == 0.0
            assert line["reward/baseline/first"] == -line["reward/baseline/second"]
        baselines = cluster.manifest(job).baselines[ENVIRONMENT]
        assert baselines["first"] == -baselines["second"] != 0.0
        points = await cluster.client.metrics(job)
        assert undocumented({name for point in points for name in point["values"]}) == []

        policies = {"policies": {"a": {}, "b": {}}, "seats": {"first": "a", "second": "b"}}
        job = await cluster.run(duel(tiny, policies))
        for policy, seat in (("a", "first"), ("b", "second")):
            part = part_id(job, policy)
            assert {line["reward/team/both"] for line in cluster.lines(part)} == {0.0}, "the other one's reward counts"
            assert cluster.manifest(part).baselines[ENVIRONMENT].keys() == {seat}
