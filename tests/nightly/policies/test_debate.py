"""The debate example with the tiny model: a judge is trained and published, then two policies argue before it. Three
adapters of one base, with vLLM and torch."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples.debate_verdicts import write_verdicts
from examples.models.make_tiny import make_tiny
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.support.cluster import ROOT, Cluster

STEPS, JUDGE_STEPS = 3, 60
LARGEST = 11
"""Sums of 20, 21 and 22: the tiny judge learns what verdicts look like, and so names a claim now and then."""
JOB_S = 900.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]


def example(name: str, base: Path, **changed: Any) -> dict[str, Any]:
    """The example with another base, and settings laid over its tables."""
    told = tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text())
    told["model"] |= {"base": str(base), "chat_template": "plain"}
    return {**told, **{table: {**told.get(table, {}), **settings} for table, settings in changed.items()}}


async def test_two_policies_argue_before_a_published_judge(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", norm_scale=3.0)
    await asyncio.to_thread(write_verdicts, tmp_path / "verdicts.jsonl", largest=LARGEST)
    lessons = example(
        "debate_judge", tiny, data={"path": str(tmp_path / "verdicts.jsonl")}, train={"steps": JUDGE_STEPS, "lr": 5e-3}
    )
    async with Cluster(tmp_path, heavy=True) as cluster:
        judge = await cluster.run(parse_spec(lessons), JOB_S)
        await cluster.client.publish(f"{judge}@latest", "debate-judge")
        told = example("debate", tiny, environment={"config": {"largest": LARGEST}}, train={"steps": STEPS})
        job = await cluster.run(parse_spec(told), JOB_S)
        alice, bob = (cluster.lines(part_id(job, name)) for name in ("alice", "bob"))
        kept = cluster.episodes(part_id(job, "alice"))
        assert {view["seat"]: view["policy"] for one in kept for view in one["views"]} == {
            "first": "alice", "second": "bob", "judge": f"{judge}@{JUDGE_STEPS}",
        }  # fmt: skip
    assert len(alice) == len(bob) == STEPS
    for one, other in zip(alice, bob, strict=True):
        assert one["reward/mean"] == pytest.approx(-other["reward/mean"], abs=1e-9)
        print({name: one[name] for name in ("reward/mean", "judge_right", "undecided")})
    assert min(line["undecided"] for line in alice) < 1.0, "the judge that was trained decides some debates"
