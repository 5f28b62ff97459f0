"""Jobs with tree sampling through all services: one policy, two policies with a team, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker.client import ApiError
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import part_id
from tests.support.cluster import Toys
from tests.support.factories import make_spec
from tests.support.lineage import undocumented

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLES = "tests.samples.tree_samples"
SIZE, GROUPS, STEPS = 4, 2, 3


def climb(model: Path | str, **changes: Any) -> JobSpec:
    parts: dict[str, Any] = {
        "model": {"base": str(model)},
        "environment": {"name": f"{SAMPLES}:Climb", "config": {"turns": 4}},
        "algorithm": {
            "name": "at_grpo", "group_size": SIZE, "groups_per_batch": GROUPS, "team": {"both": ["left", "right"]},
        },
        "rollout": {"engine": "toy", "max_tokens": 16, "max_turns": 2, "max_tokens_per_turn": 8, "seed": 3},
        "train": {"learner": "torch", "steps": STEPS},
    }  # fmt: skip
    return make_spec(**(parts | changes))


async def test_every_candidate_is_trained_once(toys: Toys, small: Path) -> None:
    cluster, _ = toys
    with pytest.raises(ApiError, match=r"(?s)environment\.name.*cannot fork: ToolCalc does not set can_fork = True"):
        await cluster.submit(climb(small, environment={"name": "tool_calc"}, algorithm={"name": "at_grpo"}))
    job = await cluster.run(climb(small))
    lines = cluster.lines(job)
    assert len(lines) == STEPS
    for line in lines:
        assert line["trajectories"] == GROUPS * (2 + 4 * (SIZE - 1)), "two seats, and the others of four turns"
        assert 0.0 <= line["reward/equal_turns"] < 1.0
        assert "reward/team/both" in line
        assert line["turns/mean"] == 2.0 and line["groups"] == GROUPS
        assert line["reward/seat/left"] + line["reward/seat/right"] == pytest.approx(0.15 * line["height"])
    ledger = await cluster.ledger(job)
    assert (ledger.accepted, ledger.failed) == (GROUPS * STEPS, {})
    points = await cluster.client.metrics(job)
    assert undocumented({name for point in points for name in point["values"]} - {"height"}) == []
    kept = (await cluster.client.rollouts(job))["rollouts"]
    assert kept and all(episode["turns"] == 4 for episode in kept), "people read the episodes, not the others"

    policies = {"policies": {"a": {}, "b": {}}, "seats": {"left": "a", "right": "b"}}
    job = await cluster.run(climb(small, **policies))
    for policy in "ab":
        for line in cluster.lines(part_id(job, policy)):
            assert line["trajectories"] == GROUPS * (1 + 2 * (SIZE - 1)), "a policy trains its own candidates"
            assert line["turns/mean"] == 2.0
