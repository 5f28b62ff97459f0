"""The server behind an environment goes away in the middle of a job, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import until
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec


@pytest.mark.timeout(240)
async def test_a_job_waits_for_its_environment_and_then_goes_on(tmp_path: Path) -> None:
    switch = tmp_path / "down"
    async with toy_cluster(tmp_path) as (cluster, model):
        environment = {"name": "tests.samples.env_samples:Switched", "config": {"file": str(switch)}}
        train = {"learner": "simulated", "steps": 40, "simulated_step_s": 0.1, "checkpoint_every": 10}
        spec = make_spec(
            model__base=str(model),
            environment=environment,
            train=train,
            rollout__retries=0,
            rollout__episode_timeout_s=2.0,
        )
        job = await cluster.submit(spec)
        await cluster.reaches(job, 3)
        switch.touch()

        async def is_told() -> bool:
            return "is down since" in (await cluster.client.job(job))["waiting_for"]

        async def is_tried() -> bool:
            return (await cluster.ledger(job)).failed.get("env_down", 0) >= 1

        await until(is_told)
        await until(is_tried)
        before = await cluster.ledger(job)
        switch.unlink()
        await cluster.succeeds(job)
        ledger = await cluster.ledger(job)
        assert ledger.balanced and ledger.accepted > before.accepted
        events = [event["event"] async for event in cluster.client.events(job)]
        assert events.index("environment_down") < events.index("environment_up")
