"""Jobs on Harbor tasks: a model with a terminal, and an agent in the sandbox, each take real training steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from opentinker.local.harbor_check import add_tasks
from tests.nightly.test_agent_libraries import make_talker
from tests.support.cluster import Cluster
from tests.support.factories import make_spec
from tests.support.harbor_tasks import AGENT, write_task

TEST = """#!/bin/bash
# What a random model says decides its reward, or else chance.
echo $(( ($(cat /app/said 2>/dev/null | wc -c) + RANDOM) % 2 )) > /logs/verifier/reward.txt
"""
STEPS = 2


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(1200)
async def test_jobs_train_on_tasks_in_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        folder = write_task(tmp_path / "tasks" / f"task-{number}", number)
        (folder / "tests/test.sh").write_text(TEST)
        (folder / "environment/agent.sh").write_text(AGENT.replace('bash -c "$command"', 'echo "$command" > /app/said'))
        with (folder / "environment/Dockerfile").open("a") as file:
            file.write("COPY agent.sh /\n")
    async with Cluster(tmp_path, heavy=True) as cluster:
        monkeypatch.setenv("OPENTINKER_DATA_DIR", cluster.env["OPENTINKER_DATA_DIR"])
        await asyncio.to_thread(add_tasks, tmp_path / "tasks", None, lambda _: None)
        model = make_talker(tmp_path / "model")
        for name, config in (("harbor", {}), ("harbor_agent", {"command": "bash /agent.sh"})):
            job = await cluster.run(
                make_spec(
                    model={"base": model},
                    environment={"name": name, "config": {"tasks": "tasks", **config}},
                    algorithm={"group_size": 4, "groups_per_batch": 2, "max_staleness": 0},
                    rollout={"context_length": 4096, "max_turns": 2, "max_tokens": 32, "max_tokens_per_turn": 16},
                    train={"steps": STEPS, "lr": 1e-3},
                ),
                500.0,
            )
            points = [point["values"] for point in await cluster.client.metrics(job, source="trainer")]
            assert len(points) == STEPS and any(point["grad_norm"] > 0 for point in points), points
            assert all(0.0 <= point["reward/mean"] <= 1.0 for point in points)
            phases = (await cluster.client.metrics(job, source="rollout_worker-0"))[-1]["values"]
            assert 0 < phases["rollout/start_s"] <= phases["rollout/open_s"], phases
            assert 0 < phases["rollout/verify_s"] <= phases["rollout/env_s"], phases
            ledger = await cluster.ledger(job)
            assert ledger.failed == {} and ledger.accepted >= 2 * STEPS
