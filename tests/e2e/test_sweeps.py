"""A sweep through real processes: it ends with the right best, whoever is killed, and others get their turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentinker.shared.api_types import Sweep
from tests.conftest import until
from tests.support.cluster import JOB_S, Cluster, toy_cluster
from tests.support.factories import make_spec

SKILL = "rollout.toy.skill"


async def test_a_sweep_finds_the_best_beside_others_and_outlives_a_kill(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        await sweep_beside_others(cluster, quick(model, [0.0, 0.2, 0.4, 1.0, 0.5]), others=1)


def quick(model: Path, skills: list[float], **table: Any) -> dict[str, Any]:
    """A sweep of quick jobs, of which the one with skill 1 earns most."""
    spec = make_spec(
        model={"base": str(model)},
        algorithm={"group_size": 4, "groups_per_batch": 4, "max_staleness": 2},
        train={"learner": "simulated", "steps": 4, "simulated_step_s": 0.02, "checkpoint_every": 4},
    ).model_dump(mode="json")
    return {**spec, "sweep": {"parameters": {SKILL: skills}, "max_running": 2, **table}}


async def sweep_beside_others(cluster: Cluster, spec: dict[str, Any], others: int) -> Sweep:
    """Run a sweep, kill its scheduler in between, and submit other jobs meanwhile."""
    client, max_running = cluster.client, spec["sweep"]["max_running"]
    id = (await client.sweep(spec))["id"]
    await until(lambda: client.sweep_state(id), lambda found: found["trials"].get("finished", 0) > 0, JOB_S)
    single = {name: part for name, part in spec.items() if name != "sweep"}
    asked = [(await client.submit({**single, "name": "other"}))["id"] for _ in range(others)]
    cluster.kill("scheduler")
    found = await client.wait_sweep(id, JOB_S * max(1, count_of(spec) // 8))
    assert (found["state"], found["trials"]) == ("succeeded", {"finished": found["planned"]})
    assert found["best"] is not None and found["best"]["settings"] == {SKILL: 1.0}
    assert len(await client.jobs(1000, tags=[id])) == found["jobs"] == found["planned"], "none was submitted twice"
    started = [job["since"] for job in await client.jobs(1000, tags=[id])]
    for place, other in enumerate(asked):
        job = await client.job(other)
        assert job["state"] == "succeeded"
        before = sum(job["created"] < at < job["since"] for at in started)
        assert before <= max_running + place, "it waited for jobs of the sweep that came later"
    return found


def count_of(spec: dict[str, Any]) -> int:
    return len(spec["sweep"]["parameters"][SKILL])
