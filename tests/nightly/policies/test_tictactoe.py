"""Two policies learn tic-tac-toe with vLLM and torch: from legal moves at random to hardly a loss against them."""

from __future__ import annotations

import tomllib
from pathlib import Path

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

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(6600)]


async def test_the_first_policy_hardly_loses_against_random_moves(tmp_path: Path, figure: Figure) -> None:
    spec = tomllib.loads((ROOT / "examples" / "tictactoe_two.toml").read_text())
    spec["model"]["base"] = str(make_tictactoe(tmp_path / "tictactoe"))
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        curves = {name: cluster.lines(part_id(job, name), "validation.jsonl") for name in ("first", "second")}
        kept = [
            each.step for _, each in list_checkpoints(cluster.data / "jobs" / part_id(job, "first") / "checkpoints")
        ]
    for name, lines in curves.items():
        figure(f"{name}: losses of 200 {[line['val/losses/random'] for line in lines]}")
        assert lines[0]["val/losses/random"] >= 20, "uniform play loses"
        assert lines[-1]["val/episodes"] == 200
        assert lines[-1]["val/forfeit"] < 0.02
    lost = {line["step"]: line["val/losses/random"] for line in curves["first"]}
    assert min(lost[step] for step in kept) == 0 and lost[kept[-1]] <= 3, "the checkpoints that one takes home"
    assert curves["second"][-1]["val/winrate/random"] >= curves["second"][0]["val/winrate/random"] + 0.2
