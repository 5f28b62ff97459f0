"""Kuhn poker with vLLM and torch: against a pool of all versions their average comes close to an equilibrium,
closer than against the newest alone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import fmean

import pytest

from examples.kuhn_exploitability import read_policy
from examples.models.make_kuhn import make_kuhn
from opentinker.envs.builtin.kuhn_rules import average_policy, exploitability
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.conftest import Figure
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 1800.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3900)]


async def averages(tmp_path: Path, latest: float) -> list[float]:
    """Run the example and return the exploitability of the average of the versions up to each checkpoint.

    `latest`: how often the opponent is the newest member of the pool.
    """
    spec = tomllib.loads((ROOT / "examples" / "kuhn_poker.toml").read_text())
    model = make_kuhn(tmp_path / "kuhn")
    spec["model"]["base"] = str(model)
    spec["pools"]["past"]["latest"] = latest
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        checkpoints = cluster.data / "jobs" / part_id(job, "player") / "checkpoints"
        kept = sorted(checkpoints.glob("step-*"))
        assert len(kept) == spec["train"]["steps"] // spec["train"]["checkpoint_every"]
        versions = [read_policy(directory, "plain", rules=False).policy for directory in (model, *kept)]
    return [exploitability(average_policy(versions[: n + 1])) for n in range(len(versions))]


async def test_the_average_against_a_pool_is_close_to_an_equilibrium(tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "latest").mkdir()
    pool, latest = await averages(tmp_path / "pool", 0.0), await averages(tmp_path / "latest", 1.0)
    figure(
        f"against the pool {[round(x, 3) for x in pool[::5]]}, against the newest {[round(x, 3) for x in latest[::5]]}"
    )
    last = slice(-(len(pool) // 3), None)
    means = fmean(pool[last]), fmean(latest[last])
    figure(f"on average over the last third: {means[0]:.3f} against the pool, {means[1]:.3f} against the newest")
    assert pool[0] == pytest.approx(11 / 24, abs=0.02), "uniform play"
    assert pool[-1] <= 0.15
    assert means[0] < means[1], "fictitious play needs the past versions; documented runs differ by as little as 0.01"
