"""Two policies learn tic-tac-toe with vLLM and torch: from legal moves at random to hardly a loss against them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples.models.make_tictactoe import make_tictactoe
from opentinker.services.trainer.checkpoint import list_checkpoints
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 6000.0
"""34 minutes on two cores that have nothing else to do; an hour beside another test."""

EVAL_S = 600.0
GAMES = 200
OTHERS_LOST = 2
"""Losses allowed in games that chose no checkpoint: a player that loses one game of 400 has more in 1.4 % of cases."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(6600)]


async def losses(cluster: Cluster, spec: dict[str, Any], checkpoint: str) -> float:
    """Return how many games a checkpoint of the first policy loses against random moves, of other ones than those of
    [validation], by which it was chosen."""
    config = spec["environment"]["config"] | spec["validation"]["config"]
    evaluation = {
        "name": "other games",
        "kind": "eval",
        "model": spec["model"],
        "start": {"from": checkpoint},
        "environment": {**spec["environment"], "config": config},
        "rollout": spec["rollout"],
        "seats": {"second": {"bot": "random"}},
        "evaluation": {"episodes": GAMES, "temperature": 0.0, "seed": spec["validation"].get("seed", 0) + 1},
    }
    values = (await cluster.succeeds(await cluster.submit(parse_spec(evaluation)), EVAL_S))["result"]["values"]
    assert values["val/episodes"] == GAMES and values["val/forfeit"] < 0.02
    return float(values["val/losses"])


async def test_the_first_policy_hardly_loses_against_random_moves(tmp_path: Path, figure: Figure) -> None:
    spec = tomllib.loads((ROOT / "examples" / "tictactoe_two.toml").read_text())
    spec["model"]["base"] = str(make_tictactoe(tmp_path / "tictactoe"))
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        curves = {name: cluster.lines(part_id(job, name), "validation.jsonl") for name in ("first", "second")}
        kept = [
            each.step for _, each in list_checkpoints(cluster.data / "jobs" / part_id(job, "first") / "checkpoints")
        ]
        lost = {line["step"]: line["val/losses/random"] for line in curves["first"]}
        best = min(kept, key=lambda step: (lost[step], -step))
        others = await losses(cluster, spec, f"{part_id(job, 'first')}@{best}")
    for name, lines in curves.items():
        figure(f"{name}: losses of 200 {[line['val/losses/random'] for line in lines]}")
        assert lines[0]["val/losses/random"] >= 20, "uniform play loses"
        assert lines[-1]["val/episodes"] == 200
        assert lines[-1]["val/forfeit"] < 0.02
    figure(f"first at step {best}: losses of {GAMES} other games {others:.0f}")
    assert lost[best] == 0 and lost[kept[-1]] <= 3, "the checkpoints that one takes home"
    assert others <= OTHERS_LOST, "games by which it was not chosen"
    assert curves["second"][-1]["val/winrate/random"] >= curves["second"][0]["val/winrate/random"] + 0.2
