"""Matching pennies with vLLM and torch: a policy settles near the equilibrium against all its past versions, and not
against the newest alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from examples.models.make_pennies import make_pennies
from examples.pennies_probabilities import read_heads
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 1500.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3300)]


async def distances(tmp_path: Path, latest: float) -> list[float]:
    """Run the example and return how far each checkpoint is from the equilibrium.

    `latest`: how often the opponent is the newest member of the pool.
    """
    spec = tomllib.loads((ROOT / "examples" / "matching_pennies.toml").read_text())
    spec["model"]["base"] = str(make_pennies(tmp_path / "pennies"))
    spec["pools"]["past"]["latest"] = latest
    async with Cluster(tmp_path, heavy=True, references=1) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        kept = sorted((cluster.data / "jobs" / part_id(job, "player") / "checkpoints").glob("step-*"))
        assert len(kept) == spec["train"]["steps"] // spec["train"]["checkpoint_every"]
        return [read_heads(directory, "plain", rules=False).distance for directory in kept]


async def test_only_a_pool_of_past_versions_settles_at_the_equilibrium(tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "newest").mkdir()
    pool, newest = await distances(tmp_path / "pool", 0.0), await distances(tmp_path / "newest", 1.0)
    figure(f"against the pool {[round(x, 3) for x in pool]}, against the newest {[round(x, 3) for x in newest]}")
    last = slice(-(len(pool) // 3), None)
    assert max(pool[last]) <= 0.1
    assert max(newest[last]) >= 0.2, "it passes by the equilibrium, and does not stay"
