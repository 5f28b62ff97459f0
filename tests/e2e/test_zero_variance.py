"""Dynamic sampling through the whole system: groups of equal rewards are replaced one for one, and not forever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker.services.trainer.learning_check import LearningCheck
from opentinker.shared.spec import AlgorithmSpec
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec


def sampling(model: Path, *, environment: str, skill: float, steps: int) -> Any:
    algorithm = {"group_size": 2, "groups_per_batch": 4, "max_staleness": 1, "drop_zero_variance": True}
    return make_spec(
        model={"base": str(model)},
        environment={"name": environment},
        algorithm={**algorithm, "max_zero_variance_batches": 5},
        rollout={"engine": "toy", "max_tokens": 8, "toy": {"skill": skill}, "seed": 0},
        train={"learner": "simulated", "steps": steps, "checkpoint_every": 4},
    )


async def test_groups_of_equal_rewards_are_replaced_and_the_ledger_balances(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        spec = sampling(model, environment="copy_digits", skill=0.6, steps=8)
        job = await cluster.run(spec)
        lines = cluster.lines(job)
        assert {line["zero_variance"] for line in lines} == {0.0} and len(lines) == 8
        ledger = await cluster.trained(job, spec)
        assert ledger.discarded["zero_variance"] > 0
        assert lines[-1]["dropped/zero_variance"] == ledger.discarded["zero_variance"]

        hopeless = sampling(model, environment="tests.samples.env_samples:Counting", skill=0.6, steps=8)
        job = await cluster.submit(hopeless)
        reason = await cluster.fails(job)
        assert "equal rewards" in reason and "drop_zero_variance" in reason
        ledger = await cluster.ledger(job)
        assert ledger.balanced and ledger.trained == 0 and ledger.discarded["zero_variance"] >= 20


@pytest.mark.parametrize(
    ("algorithm", "steps", "warned"),
    [
        ({"name": "grpo"}, [(1.0, 0.0, 0.0), (1.0, 1.0, 0.5)], True),
        ({"name": "grpo"}, [(1.0, 0.0, 0.0), (0.9, 0.1, 0.3)], False),
        ({"name": "ppo"}, [(1.0, 0.5, 0.0), (1.0, 0.5, 0.0)], True),
        ({"name": "ppo"}, [(1.0, 0.5, 0.0), (1.0, 0.6, 0.0)], False),
        ({"name": "ppo"}, [(1.0, 0.5, 0.2)], False),
        ({"name": "distill", "distill_coef": 1.0}, [(1.0, 0.0, 0.0)], False),
        ({"advantage": "per_turn"}, [(1.0, 1.0, 0.0)], False),
        ({"name": "grpo"}, [], False),
    ],
)
def test_nothing_learned(algorithm: dict[str, Any], steps: list[tuple[float, float, float]], warned: bool) -> None:
    """Per step: share of groups with equal rewards, mean and deviation of all. PPO compares across groups."""
    comparisons = LearningCheck(AlgorithmSpec.model_validate(algorithm))
    for flat, mean, spread in steps:
        comparisons.update({"zero_variance": flat, "reward/mean": mean, "reward/std": spread})
    assert bool(comparisons.warning) is warned
