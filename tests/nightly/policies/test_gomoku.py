"""Two policies learn gomoku on 5 x 5 fields with vLLM and torch, from legal moves at random."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from examples.models.make_gomoku import make_gomoku
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 3600.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3900)]


async def test_both_policies_learn_to_win_against_the_bots(tmp_path: Path, figure: Figure) -> None:
    spec = tomllib.loads((ROOT / "examples" / "gomoku_two.toml").read_text())
    spec["model"]["base"] = str(make_gomoku(tmp_path / "gomoku"))
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        curves = {name: cluster.lines(part_id(job, name), "validation.jsonl") for name in ("black", "white")}
    for name, lines in curves.items():
        for bot in ("random", "greedy"):
            figure(f"{name}: win rate against {bot} {[line[f'val/winrate/{bot}'] for line in lines]}")
        assert lines[0]["val/winrate/random"] <= 0.75, "it begins with any legal move"
        assert lines[-1]["val/forfeit"] < 0.02
        assert lines[-1]["val/winrate/random"] >= lines[0]["val/winrate/random"] + 0.25
        assert lines[-1]["val/rating"] >= lines[0]["val/rating"] + 200
