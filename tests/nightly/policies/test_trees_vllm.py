"""Tree sampling with vLLM and torch: two policies learn from the candidates of each turn, in engines of their own and
as adapters of one base that share an engine."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

SIZE, GROUPS, TURNS, STEPS = 8, 6, 4, 40
OWN_TURNS = TURNS // 2
JOB_S = 900.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16.0}], ids=["full", "lora"])
async def test_two_policies_climb_by_the_candidates_of_each_turn(
    tmp_path: Path, tiny: Path, lora: dict[str, Any] | None, figure: Figure
) -> None:
    spec: dict[str, Any] = {
        "name": "climb",
        "model": {"base": str(tiny), "chat_template": "plain", **({"lora": lora} if lora else {})},
        "environment": {"name": "tests.samples.tree_samples:Climb", "config": {"turns": TURNS}},
        "algorithm": {"name": "at_grpo", "group_size": SIZE, "groups_per_batch": GROUPS, "max_staleness": 1,
                      "team": {"both": ["left", "right"]}},
        "policies": {"a": {}, "b": {}},
        "seats": {"left": "a", "right": "b"},
        "rollout": {"max_turns": OWN_TURNS, "max_tokens": TURNS, "max_tokens_per_turn": 1},
        "train": {"steps": STEPS, "lr": 1e-2 if lora else 1e-3, "warmup_steps": 5},
    }  # fmt: skip
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        for name in "ab":
            lines = cluster.lines(part_id(job, name))
            ledger = await cluster.ledger(job, name)
            assert ledger.balanced and ledger.trained == GROUPS * STEPS == len(lines) * GROUPS
            assert {line["trajectories"] for line in lines} == {GROUPS * (1 + OWN_TURNS * (SIZE - 1))}
            assert max(line["staleness/max"] for line in lines) <= 1
            fresh = [line["mismatch/mean"] for line in lines if line["mismatch/tokens"] > 0]
            assert fresh and max(fresh) <= 1e-4, "each candidate has the log-probabilities of its own context"
            first, last = (statistics.fmean(line["reward/mean"] for line in part) for part in (lines[:5], lines[-5:]))
            figure(
                f"{'adapters' if lora else 'full weights'}, {name}: reward {first:.3f} to {last:.3f} in {STEPS} steps"
            )
            assert last > first + 0.5, "2.7 is the most"
