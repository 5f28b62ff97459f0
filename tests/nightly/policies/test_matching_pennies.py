"""Matching pennies with vLLM and torch: a policy settles near the equilibrium against all its past versions, and not
against the newest alone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from examples.models.make_pennies import make_pennies
from examples.pennies_probabilities import read_heads
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 2400.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(5400)]


class Run(NamedTuple):
    distances: list[float]
    """How far each checkpoint is from the equilibrium."""
    opponents: set[str]
    """Members of the pool that were met in the last third of the steps."""


async def run_example(tmp_path: Path, latest: float) -> Run:
    """`latest`: how often the opponent is the newest member of the pool."""
    spec = tomllib.loads((ROOT / "examples" / "matching_pennies.toml").read_text())
    spec["model"]["base"] = str(make_pennies(tmp_path / "pennies"))
    spec["pools"]["past"]["latest"] = latest
    async with Cluster(tmp_path, heavy=True, references=1) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        records = cluster.data / "jobs" / part_id(job, "player")
        kept = sorted((records / "checkpoints").glob("step-*"))
        assert len(kept) == spec["train"]["steps"] // spec["train"]["checkpoint_every"]
        found = [read_heads(directory, "plain", rules=False).distance for directory in kept]
        return Run(found, opponents_in(records / "matches.jsonl", after=spec["train"]["steps"] * 2 // 3))


def opponents_in(matches: Path, after: int) -> set[str]:
    """Return those that were met in the matches of the steps after this one."""
    steps: list[dict[str, Any]] = [orjson.loads(line) for line in matches.read_bytes().splitlines()]
    return {name for one in steps if one["step"] > after for match in one["matches"] for name in match["opponents"]}


async def test_only_a_pool_of_past_versions_settles_at_the_equilibrium(tmp_path: Path, figure: Figure) -> None:
    """Who was met tells that a run which settled, or did not, is that of the setting and no accident of another."""
    (tmp_path / "pool").mkdir()
    (tmp_path / "newest").mkdir()
    pool, newest = await run_example(tmp_path / "pool", 0.0), await run_example(tmp_path / "newest", 1.0)
    shown = [[round(distance, 3) for distance in run.distances] for run in (pool, newest)]
    figure(f"against the pool {shown[0]}, against the newest {shown[1]}")
    assert {"past@0.0", *(f"past@1.{step}" for step in range(20, 180, 20))} <= pool.opponents
    assert len(newest.opponents) <= 6, "those of the last 80 steps, each for 20"
    quarter, third = len(pool.distances) // 4, len(pool.distances) // 3
    assert max(pool.distances[-quarter:]) <= 0.1, "it settles"
    assert max(newest.distances[-quarter:]) > 0.1, "it settled without past versions"
    assert max(newest.distances[-third:]) >= 0.2, "it stayed at the equilibrium without past versions"
