"""Hierarchical credit in a job: a proposer, and one policy on all seats of a pattern, compared within each match."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.types.core import part_id
from tests.support.cluster import Toys
from tests.support.factories import make_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOLVERS = [f"solver_{number}" for number in range(1, 5)]
GROUP_SIZE, GROUPS, STEPS = 2, 2, 3


def advantage_of(view: dict[str, Any]) -> float:
    """Return the advantage of a view, which all its sampled tokens have in common."""
    (found,) = {
        advantage for advantage, own in zip(view["tokens"]["advantages"], view["tokens"]["mask"], strict=True) if own
    }
    return float(found)


async def test_solvers_of_one_problem_are_compared_with_each_other_and_proposals_with_proposals(
    toys: Toys, small: Path
) -> None:
    cluster, _ = toys
    spec = make_spec(
        model={"base": str(small)},
        environment={"name": "tests.samples.seat_samples:ParitySums"},
        algorithm={"name": "grpo", "group_size": GROUP_SIZE, "groups_per_batch": GROUPS},
        rollout={"engine": "toy", "max_tokens": 8, "max_turns": 1, "transcripts": GROUP_SIZE * GROUPS, "seed": 3},
        train={"learner": "torch", "steps": STEPS},
        policies={"proposer": {}, "solver": {"algorithm": {"episode_peers": {"solvers": ["solver_*"]}}}},
        seats={"proposer": "proposer", "solver_*": "solver"},
    )
    job = await cluster.run(spec)
    for name, seats in (("proposer", 1), ("solver", len(SOLVERS))):
        ledger = await cluster.trained(job, spec, name)
        assert ledger.running == ledger.pending == 0
        lines = cluster.lines(part_id(job, name))
        assert [line["trajectories"] for line in lines] == [GROUPS * GROUP_SIZE * seats] * STEPS
    episodes = cluster.episodes(part_id(job, "solver"))
    assert len(episodes) == STEPS * GROUPS * GROUP_SIZE
    taught = 0
    for one in episodes:
        views = {view["seat"]: view for view in one["views"]}
        assert {seat: view["policy"] for seat, view in views.items()} == {
            "proposer": "proposer",
            **dict.fromkeys(SOLVERS, "solver"),
        }
        credited = {seat: advantage_of(views[seat]) for seat in SOLVERS}
        assert math.fsum(credited.values()) == pytest.approx(0.0, abs=1e-3), "centred in each match"
        right = {seat: views[seat]["reward"] for seat in SOLVERS}
        assert len(set(right.values())) == len(set(credited.values()))
        taught += len(set(right.values())) > 1
        assert all((credited[seat] > 0) == (right[seat] == 1.0) for seat in SOLVERS if len(set(right.values())) > 1)
    assert taught, "some matches have right and wrong solvers"
    proposed: dict[int, list[float]] = {}
    for one in cluster.episodes(part_id(job, "proposer")):
        (view,) = (view for view in one["views"] if view["seat"] == "proposer")
        proposed.setdefault(one["group"], []).append(advantage_of(view))
    assert len(proposed) == STEPS * GROUPS
    for advantages in proposed.values():
        assert len(advantages) == GROUP_SIZE and math.fsum(advantages) == pytest.approx(0.0, abs=1e-3)
