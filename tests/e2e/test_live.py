"""Inference jobs that follow the live policy of a job that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from opentinker.client import AsyncClient
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.engines import versions_at_once
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, WeightVersion
from opentinker.shared.types.errors import SpecError
from tests.conftest import WAIT_S, until
from tests.support.api import OPERATOR, refused
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec
from tests.support.lineage import undocumented
from tests.support.scheduling import kinds, new_job


def live(base: str, source: str, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"name": "talk", "kind": "inference", "rollout": {"engine": "toy"}}
    return parse_spec({**fields, "model": {"base": base}, "start": {"from": f"{source}@live"}, **changes})


async def test_the_live_policy_is_served_version_by_version_and_training_does_not_depend_on_it(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path, rollout_workers=2) as (cluster, model):
        train = {"learner": "simulated", "steps": 2000, "simulated_step_s": 0.05, "checkpoint_every": 1000}
        source = await cluster.submit(make_spec(model={"base": str(model)}, train=train))
        await cluster.reaches(source, 2)
        job = await cluster.submit(live(str(model), source))
        url = f"{cluster.client.url}/v1/jobs/{job}/v1"
        await cluster.runs(job)
        async with AsyncOpenAI(base_url=url, api_key=OPERATOR, timeout=WAIT_S) as openai:
            names = [card.id async for card in await openai.models.list()]
            assert names == [f"{source}@live", "talk", job]

            async def version() -> WeightVersion:
                answer = await openai.completions.create(model=job, prompt="12=", max_tokens=2)
                return WeightVersion.parse(str(answer.system_fingerprint).removeprefix("weights-"))

            first = await version()
            assert first.epoch == 1
            await until(version, lambda found: found > first)
            holder = (await cluster.client.job(job))["workers"][0]["id"]
            cluster.kill(holder)
            step = await cluster.step(source)
            await cluster.reaches(source, step + 5)
            killed = await version()  # waits for the next worker
            assert killed > first

        points = await cluster.client.metrics(job)
        assert undocumented({name for p in points for name in p["values"]}) == []
        await cluster.client.cancel(source)
        record = await cluster.wait(job)
        assert record["state"] == "succeeded"
        assert record["reason"] == (
            f"job {source}, whose live policy it served, has cancelled; {source}@latest is its newest checkpoint"
        )
        assert "trainer_lost" not in await kinds(cluster.store, source)


def test_a_live_adapter_is_served_in_more_versions_than_one_and_the_next() -> None:
    assert versions_at_once(live("m", "j-0123456789")) == 6
    assert versions_at_once(make_spec(algorithm={"max_staleness": 1})) == 3


async def test_what_has_no_live_policy_says_what_can_be_served(client: AsyncClient, store: Store) -> None:
    rows = await new_job(store, "j-rows000000", JobState.RUNNING, kind="rl")
    over = await new_job(store, "j-over000000", JobState.SUCCEEDED)
    foreign = await new_job(store, tenant="others")

    assert "has succeeded: take a checkpoint of it" in (await refused(client, live("m", over)))["start.from"]
    assert "you have no job" in (await refused(client, live("m", foreign)))["start.from"]
    wrong = await refused(client, live("m", rows, rollout={"engine": "vllm"}, model={"base": "other", "lora": {}}))
    assert set(wrong) == {"rollout.engine", "model.base", "model.lora"}
    with pytest.raises(SpecError, match="follows a live policy"):
        make_spec(start={"from": f"{rows}@live"})
