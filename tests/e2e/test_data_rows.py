"""Counts of rows through the whole system, of jobs that train and evaluate, compared with their episodes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec

SAID = {"name": "tests.samples.listed_rows:Said", "config": {"count": 6}}
STEPS, GROUPS, SIZE = 9, 2, 4


def trained(model: Path, **algorithm: Any) -> Any:
    return make_spec(
        model={"base": str(model)},
        environment=SAID,
        algorithm={"group_size": SIZE, "groups_per_batch": GROUPS, "max_staleness": 1, **algorithm},
        rollout={"engine": "toy", "max_tokens": 4, "toy": {"skill": 0.5}, "transcripts": GROUPS * SIZE, "seed": 0},
        train={"learner": "simulated", "steps": STEPS, "checkpoint_every": 4},
    )


async def test_rows_of_a_job_have_the_counts_of_its_episodes(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        job = await cluster.run(trained(model))
        rewards: dict[int, list[float]] = defaultdict(list)
        steps: dict[int, set[int]] = defaultdict(set)
        prompts: dict[int, int] = {}
        for step in range(1, STEPS + 1):
            for one in (await cluster.client.rollouts(job, step))["rollouts"]:
                rewards[one["row"]].append(one["reward"])
                steps[one["row"]].add(step)
                tokens = one["views"][0]["tokens"]
                assert tokens is not None
                prompts[one["row"]] = tokens["mask"].index(1)
        found = await cluster.client.rows(job)
        assert (found["count"], found["played"], found["source"]) == (6, 6, SAID["name"])
        for row in found["rows"]:
            own = rewards[row["row"]]
            assert (row["played"], row["reward"], row["solved"]) == (
                len(own),
                *[pytest.approx(sum(own) / len(own))] * 2,
            )
            assert sum(point["played"] for point in row["series"]) == len(own)
            assert row["kept"] == sorted(steps[row["row"]]) == [point["step"] for point in row["series"]]
            assert (row["prompt"], row["place"]) == (f"say {row['row']}", f"digit {row['row']}")
            assert row["tokens"] == prompts[row["row"]] == len(row["prompt"])
        assert sum(row["played"] for row in found["rows"]) == STEPS * GROUPS * SIZE

        sampled = await cluster.run(trained(model, drop_zero_variance=True))
        ledger = await cluster.ledger(sampled)
        assert ledger.discarded["zero_variance"] > 0
        counted = sum(row["played"] for row in (await cluster.client.rows(sampled))["rows"])
        assert STEPS * GROUPS * SIZE < counted <= SIZE * (ledger.trained + sum(ledger.discarded.values()))

        plan = {"episodes": 5, "samples": 3, "temperature": 1.0, "transcripts": 15}
        spec = {
            "name": "look", "kind": "eval", "model": {"base": str(model)}, "environment": SAID,
            "rollout": {"engine": "toy", "max_tokens": 4, "toy": {"skill": 0.5}}, "evaluation": plan,
        }  # fmt: skip
        evaluated = (await cluster.client.submit(spec))["id"]
        assert (await cluster.wait(evaluated))["state"] == "succeeded"
        scores: dict[int, list[float]] = defaultdict(list)
        for exam in (await cluster.client.transcripts(evaluated))["transcripts"]:
            scores[exam["row"]].append(exam["reward"])
        rows = (await cluster.client.rows(evaluated, sort="-played"))["rows"]
        assert [row["played"] for row in rows] == [3, 3, 3, 3, 3, 0]
        assert {row["row"]: row["reward"] for row in rows[:5]} == {row: sum(own) / 3 for row, own in scores.items()}
