"""Kuhn poker with vLLM and torch: against a pool of all its versions a policy comes close to an equilibrium on average
of these versions."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from examples.kuhn_exploitability import read_policy
from examples.models.make_kuhn import make_kuhn
from opentinker.envs.builtin.kuhn_rules import average_policy, exploitability
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[3]
JOB_S = 1800.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2100)]


async def test_the_average_against_a_pool_is_close_to_an_equilibrium(tmp_path: Path) -> None:
    spec = tomllib.loads((ROOT / "examples" / "kuhn_poker.toml").read_text())
    model = make_kuhn(tmp_path / "kuhn")
    spec["model"]["base"] = str(model)
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        checkpoints = cluster.data / "jobs" / part_id(job, "player") / "checkpoints"
        kept = sorted(checkpoints.glob("step-*"))
        assert len(kept) == spec["train"]["steps"] // spec["train"]["checkpoint_every"]
        versions = [read_policy(directory, "plain", rules=False).policy for directory in (model, *kept)]
    curve = [exploitability(average_policy(versions[: n + 1])) for n in range(len(versions))]
    print("average:", [round(x, 3) for x in curve], "newest:", [round(exploitability(each), 3) for each in versions])
    assert curve[0] == pytest.approx(11 / 24, abs=0.02), "uniform play"
    assert curve[-1] <= 0.25, "how soon the cards are told apart differs from run to run"
