"""A policy learns against its own past versions, end to end: who is met, what is counted, and what kills change."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.evaluation.pool_draws import choose_opponent
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import part_id
from opentinker.shared.types.pools import members_of
from tests.conftest import until
from tests.support.cluster import Cluster, toy_cluster
from tests.support.lineage import lineage, undocumented
from tests.support.toys import toy_game

STEPS, BATCH, SIZE, SEED = 24, 2, 2, 7


def game(model: Path, **changes: Any) -> JobSpec:
    parts: dict[str, Any] = {
        "environment": {"name": "matching_pennies", "config": {"rules": False}},
        "algorithm": {"group_size": SIZE, "groups_per_batch": BATCH, "max_staleness": 1},
        "rollout": {"engine": "toy", "max_tokens": 4, "transcripts": 64, "seed": SEED},
        "train": {"learner": "simulated", "steps": STEPS, "simulated_step_s": 0.02, "checkpoint_every": 5},
        "seats": {"odd": {"pool": "past"}},
        "pools": {"past": {"every": 4, "keep": 10, "latest": 0.3}},
    }
    return toy_game(model, **{**parts, **changes})


def met(cluster: Cluster, part: str) -> dict[int, str]:
    """Return whom the policy met in each group, by the kept episodes of the surviving steps."""
    found: dict[int, set[str]] = {}
    for one in cluster.episodes(part):
        assert len(one["views"]) == 2, "the words of both seats"
        (opponent,) = (view for view in one["views"] if "@" in view["policy"])
        version = opponent["policy"].removeprefix("past@")
        assert {span[2] for span in opponent["tokens"]["versions"]} == {version}, "one member from begin to end"
        found.setdefault(one["group"], set()).add(version)
    assert all(len(versions) == 1 for versions in found.values()), "a group meets one opponent"
    return {group: versions.pop() for group, versions in sorted(found.items())}


async def grown(cluster: Cluster, job: str) -> list[str]:
    return [str(event["member"]) for event in await cluster.store.events(job) if event["event"] == "pool_grown"]


async def test_a_policy_meets_the_members_that_the_draw_names(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        validation = {"every": 12, "episodes": 4, "against": [{"bot": "random"}]}
        spec = game(model, validation=validation)
        job = await cluster.run(spec)
        lines, manifest = cluster.lines(job), cluster.manifest(job)
        await cluster.trained(job, spec)

        members = ["0.0", *await grown(cluster, job)]
        assert members == ["0.0", *(f"1.{step}" for step in range(4, STEPS, 4))]
        assert [str(member.version) for member in manifest.pools["past"]] == members
        there = 1
        opponents = met(cluster, job)
        for group, version in opponents.items():
            while version != choose_opponent(
                members[:there], {}, rule="uniform", latest=0.3, seed=SEED, match=group, pool="past"
            ):
                there += 1
                assert there <= len(members), f"group {group} met {version}, which no draw names"
        assert set(opponents) == {seq for line in lines for seq in line["seqs"]} and len(set(opponents.values())) > 3

        games = [sum(member.outcomes) for member in manifest.pools["past"]]
        assert sum(games) == STEPS * BATCH * SIZE, "every match is a result"
        assert games == [SIZE * list(opponents.values()).count(member) for member in members]
        assert [line["pool/past/size"] for line in lines][:: STEPS - 1] == [1.0, 6.0]
        assert sum(line["pool/past/games"] for line in lines) == sum(games) and "pool/past/winrate" in lines[-1]
        assert undocumented(name for name in lines[-1] if name.startswith("pool/")) == []
        assert [line["step"] for line in cluster.lines(job, "validation.jsonl")] == [0, 12, STEPS], "against the bot"
        await until(lambda: not members_of(cluster.data, job, "").exists())


@pytest.mark.nightly
async def test_kills_leave_the_pool_as_it_would_be(tmp_path: Path) -> None:
    steps = 60
    async with toy_cluster(tmp_path, rollout_workers=2) as (cluster, model):
        spec = game(
            model,
            policies={"learner": {}},
            seats={"even": "learner", "odd": {"pool": "past"}},
            pools={"past": {"policy": "learner", "every": 4, "keep": 3, "rule": "pfsp_even", "stretch": 2}},
            match={"rotate": True},
            algorithm={"group_size": 4, "groups_per_batch": BATCH, "max_staleness": 1},
            train={"learner": "simulated", "steps": steps, "simulated_step_s": 0.05, "checkpoint_every": 5},
            resources={"rollout_workers": 2},
        )
        job = await cluster.submit(spec)
        part, order = part_id(job, "learner"), random.Random(1)
        for name in ("trainer-0", "rollout_worker-0", "trainer-0", "rollout_worker-1", "scheduler", "trainer-0"):
            before = await cluster.step(job)
            await cluster.reaches(job, min(before + 6, steps))
            await asyncio.sleep(order.uniform(0.0, 0.4))
            cluster.kill(name)
        await cluster.succeeds(job)
        lines, manifest = cluster.lines(part), cluster.manifest(part)
        await cluster.trained(job, spec, "learner")

        members = manifest.pools["past"]
        assert [member.version.step for member in members] == [steps - 12, steps - 8, steps - 4]
        kept = {(line["epoch"], line["step"]) for line in lineage(lines, manifest.resumed)}
        assert all((member.version.epoch, member.version.step) in kept for member in members), "none was rolled back"
        assert len(manifest.resumed) == 4, "three trainers were killed"
        assert not any("Traceback" in cluster.logs(name) for name in ("rollout_worker-0", "rollout_worker-1"))
