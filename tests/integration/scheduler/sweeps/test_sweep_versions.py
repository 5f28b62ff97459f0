"""What the values of a sweep name, uploads and checkpoints, is that of its submission for all of its jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opentinker.client import AsyncClient
from opentinker.sdk.client import ApiConflict
from opentinker.services.scheduler.sweeps import submission
from opentinker.services.scheduler.sweeps.submission import _with_names
from opentinker.shared.runtime.service import Context
from tests.conftest import until
from tests.samples.upload_samples import numbered
from tests.support.api import SPEC, Http, mistakes, write_checkpoint
from tests.support.sweeps import ends, jobs_of, play

FILES = {"trainer/state.json": b"{}"}
checked = pytest.mark.parametrize("most", [64, 0], ids=["checked", "beyond those that are checked"])


async def play_in_turn(ctx: Context, http: Http, sweep: str, first: int, last: int) -> None:
    """Play these jobs of a sweep that submits one at a time."""
    for number in range(first, last):
        jobs = await until(partial(jobs_of, http, sweep), partial(_has, number))
        await play(ctx, jobs[number]["id"], [0.5])


def _has(number: int, jobs: list[dict[str, Any]]) -> bool:
    return len(jobs) > number


@checked
async def test_all_jobs_of_a_value_play_one_version_of_its_upload(
    http: Http, client: AsyncClient, ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(submission, "MAX_CHECKED", most)
    versions = [(await client.push_environment(numbered(tmp_path, 1), name))["environment"] for name in ("one", "two")]
    table = {"parameters": {"environment.name": ["upload:one", "upload:two"]}, "seeds": [1, 2], "max_running": 1}
    status, sweep = await http("POST", "/v1/sweeps", json={**SPEC, "environment": {}, "sweep": table})
    assert status == 201, sweep
    await play_in_turn(ctx, http, sweep["id"], 0, 1)
    for name in ("one", "two"):
        assert (await client.push_environment(numbered(tmp_path, 2), name))["version"] == 2
    await play_in_turn(ctx, http, sweep["id"], 1, 4)
    over = await ends(http, sweep["id"])
    assert [trial["settings"]["environment.name"] for trial in over["all_trials"]] == versions
    records = [await ctx.store.job(job["id"]) for job in await jobs_of(http, sweep["id"])]
    names = [record.spec["environment"]["name"] for record in records]
    assert names == [versions[0], versions[0], versions[1], versions[1]]


@pytest.mark.parametrize("earlier", [False, True], ids=["", "stored by an earlier release"])
async def test_an_upload_stays_while_a_sweep_has_jobs_to_come_that_play_it(
    http: Http, client: AsyncClient, ctx: Context, tmp_path: Path, earlier: bool
) -> None:
    for number in (1, 2):
        for name in ("one", "two"):
            await client.push_environment(numbered(tmp_path, number), name)
    parameters = {"environment.name": ["upload:one@1", "upload:two"], "train.lr": [1e-5]}
    table = {"parameters": parameters, "max_running": 1}
    base = {**SPEC, "environment": {"name": "upload:two@1"}, "sweep": table}
    status, sweep = await http("POST", "/v1/sweeps", json=base)
    assert status == 201, sweep
    if earlier:
        await ctx.store.redis.hdel(f"sweep:{sweep['id']}", "uses")
    await until(partial(jobs_of, http, sweep["id"]), partial(_has, 0))
    with pytest.raises(ApiConflict, match=f"sweep {sweep['id']} "):
        await client.delete_environment("two", 2)
    assert await client.delete_environment("two", 1) == [1], "none of its jobs plays it"


async def trained(http: Http, ctx: Context) -> str:
    """A job with a checkpoint of step 10."""
    job = await http.job()
    write_checkpoint(ctx, job, 10, FILES)
    return job


@checked
async def test_the_newest_checkpoints_are_those_of_the_submission(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(submission, "MAX_CHECKED", most)
    one, two = [await trained(http, ctx) for _ in range(2)]

    def spec(*checkpoints: str) -> dict[str, Any]:
        base = {name: part for name, part in SPEC.items() if name != "start"}
        return {**base, "sweep": {"parameters": {"start.from": checkpoints}, "max_running": 1}}

    status, sweep = await http("POST", "/v1/sweeps", json=spec(f"{one}@latest", f"{two}@latest"))
    assert status == 201, sweep
    write_checkpoint(ctx, two, 20, FILES)
    await play_in_turn(ctx, http, sweep["id"], 0, 2)
    over = await ends(http, sweep["id"])
    assert [trial["settings"]["start.from"] for trial in over["all_trials"]] == [f"{one}@10", f"{two}@10"]
    started = [(await ctx.store.job(job["id"])).spec["start"]["from"] for job in await jobs_of(http, sweep["id"])]
    assert started == [f"{one}@10", f"{two}@10"]
    status, body = await http("POST", "/v1/sweeps", json=spec(f"{two}@20", f"{one}@latest", f"{two}@latest"))
    assert status == 422 and list(mistakes(body)) == ["sweep.parameters.start.from"]
    assert body["errors"][0]["value"] == f"{two}@latest" and "same as another value" in body["errors"][0]["problem"]
    status, body = await http("POST", "/v1/sweeps", json=spec(f"{one}@latest", f"{two}@15"))
    assert status == 422 and "there are: 10, 20" in mistakes(body)["sweep.parameters.start.from"]


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("start.from", "a", "j@1"),
        ("start", {"from": "a", "optimizer": True}, {"from": "j@1", "optimizer": True}),
        ("seats", {"x.y": {"frozen": "a"}, "z": "b"}, {"x.y": {"frozen": "k@2"}, "z": "b"}),
        ("validation.against", [{"bot": "b"}, {"frozen": "a"}], [{"bot": "b"}, {"frozen": "l@3"}]),
        ("validation.against.1.frozen", "a", "l@3"),
        ("validation.against.1", {"frozen": "a"}, {"frozen": "l@3"}),
        ("rollout", {"a": 1}, {"a": 1}),
    ],
)
def test_a_value_names_what_was_found_wherever_it_names_something(path: str, value: Any, found: Any) -> None:
    names = {
        ("start", "from"): "j@1",
        ("seats", "x.y", "frozen"): "k@2",
        ("validation", "against", "1", "frozen"): "l@3",
    }
    before = repr(value)
    assert _with_names(path, value, names) == found and repr(value) == before
