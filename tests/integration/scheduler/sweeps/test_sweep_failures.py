"""Sweeps survive schedulers that die at the worst moment, faults of their own, and unavailable references."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.sweeps import adaptive, controller, curves, running_sweep
from opentinker.services.scheduler.sweeps.running_sweep import RunningSweep
from opentinker.services.scheduler.sweeps.trial_jobs import cancel_job
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Fenced, SpecError
from opentinker.shared.types.sweeps import Trial
from tests.conftest import NewContext, soon, until
from tests.support.api import SPEC, Http, bearing, new_key_of
from tests.support.factories import make_spec
from tests.support.scheduling import built_with, scheduler
from tests.support.sweeps import SKILL, SKILLS, ends, jobs_of, play, play_all, skill, submitted, swept


@asynccontextmanager
async def another_leader(new_context: NewContext, ctx: Context, http: Http) -> AsyncIterator[tuple[Context, Http]]:
    """The scheduler dies, and another one leads."""
    ctx.stopping.set()
    async with new_context("scheduler-1") as second, scheduler(second) as url:
        yield second, Http(http.session, url)


class Gate:
    """Stands before or behind a function: a call waits there until it is opened."""

    def __init__(self, call: Callable[..., Any], *, behind: bool = False) -> None:
        self.call, self.behind = call, behind
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any, **options: Any) -> Any:
        answer = await self.call(*args, **options) if self.behind else None
        self.reached.set()
        await self.opened.wait()
        return answer if self.behind else await self.call(*args, **options)


async def test_a_killed_scheduler_resumes_a_sweep(http: Http, ctx: Context, new_context: NewContext) -> None:
    sweep = await submitted(http, max_running=1)
    before = await until(lambda: jobs_of(http, sweep), len)
    await play(ctx, before[0]["id"], [0.5] * 2, JobState.RUNNING)
    async with another_leader(new_context, ctx, http) as (second, again):
        await play(second, before[0]["id"], [0.5], first=3)
        over = await play_all(second, again, sweep, lambda spec: [skill(spec)] * 3)
    assert over["state"] == "succeeded" and over["jobs"] == 3, "no job was submitted twice"
    assert over["all_trials"][0]["jobs"][0]["id"] == before[0]["id"]


async def test_a_sweep_of_an_older_release_goes_on_with_names_that_are_refused_now(
    http: Http, ctx: Context, new_context: NewContext
) -> None:
    sweep = await submitted(http, max_running=1)
    (first,) = await until(lambda: jobs_of(http, sweep), len)
    ctx.stopping.set()
    await until(lambda: not ctx.detail["leads"])
    target = {"p/reward/mean": 9.0}
    base = {**swept(), "policies": {"p": {}}, "seats": {"*": "p"}, "train": {**SPEC["train"], "target": target}}
    del base["sweep"]
    await ctx.store.redis.hset(f"sweep:{sweep}", "base", orjson.dumps(base))
    async with another_leader(new_context, ctx, http) as (second, again):
        await play(second, first["id"], [0.5])
        jobs = await until(lambda: jobs_of(again, sweep), lambda found: len(found) == 2)
        assert (await second.store.job(jobs[1]["id"])).spec["train"]["target"] == target


async def test_trials_that_ended_under_an_older_release_are_compared_with(
    http: Http, ctx: Context, new_context: NewContext
) -> None:
    sweep = await submitted(http, early_stopping={"min_steps": 2, "min_trials": 2})
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    for job, value in zip(jobs[1:], (0.9, 0.8), strict=True):
        await play(ctx, job["id"], [value] * 2)
    await until(lambda: http("GET", f"/v1/sweeps/{sweep}"), lambda shown: shown[1]["trials"].get("finished") == 2)
    ctx.stopping.set()
    await until(lambda: not ctx.detail["leads"])
    key = f"sweep:{sweep}:trials"
    for number, text in (await ctx.store.redis.hgetall(key)).items():
        trial = orjson.loads(text)
        for one in trial["jobs"]:
            one["curve"] = list(one.pop("rungs").items())
        await ctx.store.redis.hset(key, number, orjson.dumps(trial))
    async with another_leader(new_context, ctx, http) as (second, again):
        await play(second, jobs[0]["id"], [0.1] * 2, JobState.RUNNING)
        over = await ends(again, sweep)
    assert [trial["state"] for trial in over["all_trials"]] == ["stopped", "finished", "finished"]
    assert "is worse than the median of 2 other trials" in over["all_trials"][0]["reason"]


SPEC_OF = RunningSweep._spec


def _refusing_first(sweep: Any, trial: Trial, job: Any) -> dict[str, Any]:
    if trial.number == 0:
        raise SpecError.of("train.lr", 1, "is refused")
    return SPEC_OF(sweep, trial, job)


@pytest.mark.parametrize("body", ["", "of an older release"])
async def test_a_job_whose_leader_died_before_it_was_noted_is_adopted(
    http: Http, ctx: Context, new_context: NewContext, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    gate = Gate(submit, behind=True)
    monkeypatch.setattr(running_sweep, "submit", gate)
    sweep = await submitted(http, max_running=1)
    await soon(gate.reached.wait())
    monkeypatch.setattr(running_sweep, "submit", submit)
    (job,) = await jobs_of(http, sweep)
    if body:  # its spec would be refused now
        monkeypatch.setattr(RunningSweep, "_spec", _refusing_first)
        await ctx.store.redis.hset(f"idem:default:sweep {sweep} 0 0", "body", body)
    async with another_leader(new_context, ctx, http) as (second, again):
        over = await play_all(second, again, sweep, lambda spec: [skill(spec)])
        assert len(await jobs_of(again, sweep)) == 3
    assert over["state"] == "succeeded" and over["all_trials"][0]["jobs"][0]["id"] == job["id"]


async def test_a_trial_whose_leader_died_before_its_job_was_cancelled_is_stopped_by_the_next(
    http: Http, ctx: Context, new_context: NewContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(cancel_job)
    monkeypatch.setattr(running_sweep, "cancel_job", gate)
    sweep = await submitted(http, early_stopping={"min_steps": 2, "min_trials": 2})
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    for job, value in zip(jobs[::-1], (0.9, 0.8, 0.1), strict=True):
        await play(ctx, job["id"], [value] * 2, JobState.RUNNING)
    await soon(gate.reached.wait())
    monkeypatch.setattr(running_sweep, "cancel_job", cancel_job)
    _, shown = await http("GET", f"/v1/sweeps/{sweep}")
    assert [trial["state"] for trial in shown["all_trials"]] == ["stopped", "running", "running"]
    assert (await ctx.store.job(jobs[0]["id"])).state is JobState.RUNNING
    async with another_leader(new_context, ctx, http) as (second, again):
        stopped = await until(lambda: second.store.job(jobs[0]["id"]), lambda job: job.state.final)
        assert "is worse than the median" in stopped.reason
        for job in jobs[1:]:
            await play(second, job["id"], [0.8], first=3)
        assert (await ends(again, sweep))["trials"] == {"stopped": 1, "finished": 2}


async def test_a_sweep_is_not_deleted_while_its_leader_submits_a_job(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(submit)
    monkeypatch.setattr(running_sweep, "submit", gate)
    headers = {"Idempotency-Key": "once"}
    _, made = await http("POST", "/v1/sweeps", json=swept(), headers=headers)
    sweep = made["id"]
    await soon(gate.reached.wait())
    assert (await http("POST", f"/v1/sweeps/{sweep}/cancel"))[0] == 200
    status, body = await http("DELETE", f"/v1/sweeps/{sweep}")
    assert status == 409 and "still being cancelled" in body["detail"]
    gate.opened.set()
    _, body = await until(lambda: http("DELETE", f"/v1/sweeps/{sweep}"), lambda answer: answer[0] == 200)
    jobs = await jobs_of(http, sweep)
    assert [job["state"] for job in jobs] == ["cancelled"] * len(jobs) and body["jobs"]
    assert {job["id"] for job in jobs} == set(body["jobs"])
    status, other = await http("POST", "/v1/sweeps", json=swept(), headers=headers)
    assert status == 201 and other["id"] != sweep, "the key of a deleted sweep is free again"


async def test_an_earlier_leader_submits_no_job(ctx: Context, http: Http) -> None:
    spec = make_spec().model_dump(mode="json")
    with pytest.raises(Fenced):
        await ctx.store.create_job(id="j-earlier", spec=spec, tenant="default", leader=10**6)
    assert not await ctx.store.jobs(["j-earlier"])


async def test_metrics_too_large_for_a_mean_fail_their_trial_alone(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_with(monkeypatch, controller, RunningSweep, late_s=0.5)
    sweep = await submitted(http, parameters={SKILL: [0.1, 0.2]})
    over = await play_all(ctx, http, sweep, lambda spec: [1.7e308 if skill(spec) < 0.15 else 0.5] * 3)
    assert over["trials"] == {"failed": 1, "finished": 1} and over["best"]["number"] == 1
    assert over["all_trials"][0]["reason"] == "no value of its metric reward/mean is a number below 1e+300"


async def test_a_fault_ends_its_sweep_and_no_other(http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = await submitted(http)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)

    def fault(_: object) -> float:
        raise OverflowError("too large")

    value = curves.History.value
    monkeypatch.setattr(curves.History, "value", fault)
    over = await ends(http, sweep)
    assert (over["state"], over["reason"]) == ("failed", "it cannot continue: OverflowError: too large")
    for job in jobs:
        ended = await until(partial(ctx.store.job, job["id"]), lambda job: job.state.final)
        assert ended.reason == f"sweep {sweep} failed: it cannot continue: OverflowError: too large"
    monkeypatch.setattr(curves.History, "value", value)
    other = await submitted(http)
    assert (await play_all(ctx, http, other, lambda spec: [skill(spec)]))["state"] == "succeeded"


@pytest.mark.parametrize("broken", ["trial", "record"])
async def test_a_sweep_that_cannot_be_read_ends_and_its_jobs_are_cancelled(
    http: Http, ctx: Context, new_context: NewContext, broken: str
) -> None:
    sweep = await submitted(http, max_running=1)
    (job,) = await until(lambda: jobs_of(http, sweep), len)
    ctx.stopping.set()
    await until(lambda: not ctx.detail["leads"])
    if broken == "trial":
        unreadable = orjson.dumps({"number": 0, "settings": {}, "jobs": [{"id": job["id"], "step": None}]})
        await ctx.store.redis.hset(f"sweep:{sweep}:trials", "0", unreadable)
    else:
        await ctx.store.redis.hset(f"sweep:{sweep}", "progress", b"[]")
    async with another_leader(new_context, ctx, http) as (second, _):
        ended = await until(lambda: second.store.job(job["id"]), lambda job: job.state.final)
        assert "it cannot continue: ValidationError" in ended.reason
        await until(lambda: second.store.redis.smembers("sweeps:active"), lambda active: not active)
        assert await second.store.redis.hget(f"sweep:{sweep}", "state") == "failed"


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
async def test_a_job_that_is_refused_is_submitted_again_for_a_while(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    refusals = [SpecError.of("notify.0.url", "x", "host 'x' cannot be resolved")] * 2

    async def refusing(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await submit(*args, **options)

    built_with(monkeypatch, controller, RunningSweep, retry_s=0.05, refused_s=patience_s)
    monkeypatch.setattr(running_sweep, "submit", refusing)
    over = await play_all(ctx, http, await submitted(http), lambda spec: [skill(spec)])
    if patience_s:
        assert over["trials"] == {"finished": 3} and {trial["reason"] for trial in over["all_trials"]} == {""}
    else:
        assert over["trials"] == {"failed": 2, "finished": 1}
        assert "its job was refused: notify.0.url" in over["all_trials"][0]["reason"]


async def test_each_job_that_is_refused_has_its_own_while(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [SpecError.of("environment.name", "served:x", "no process serves it")] * 2

    async def refusing(ctx: Context, spec: dict[str, Any], *args: Any, **options: Any) -> Any:
        if skill(spec) == SKILLS[0]:
            raise refusals[0]
        if len(refusals) > 1:
            raise refusals.pop()
        return await submit(ctx, spec, *args, **options)

    built_with(monkeypatch, controller, RunningSweep, retry_s=0.05, refused_s=2.0)
    monkeypatch.setattr(running_sweep, "submit", refusing)
    over = await play_all(ctx, http, await submitted(http), lambda spec: [skill(spec)])
    assert [trial["state"] for trial in over["all_trials"]] == ["failed", "finished", "finished"]


async def test_a_search_that_fails_fails_its_sweep(http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    suggest = adaptive.suggest

    def failing(table: Any, trials: Any) -> Any:
        if len(trials) == 2:
            raise RuntimeError("no more")
        return suggest(table, trials)

    monkeypatch.setattr(adaptive, "suggest", failing)
    parameters = {SKILL: {"low": 0.1, "high": 0.9}}
    sweep = await submitted(http, method="tpe", trials=5, parameters=parameters)
    over = await play_all(ctx, http, sweep, lambda spec: [skill(spec)])
    assert (over["state"], over["reason"]) == ("failed", "no further values were found: no more")
    assert over["trials"] == {"finished": 2} and over["best"] is not None


async def test_a_revoked_key_submits_no_more_jobs(http: Http, ctx: Context) -> None:
    key = await new_key_of(ctx.store)
    async with aiohttp.ClientSession(headers=bearing(key)) as session:
        sweep = await submitted(Http(session, http.url), max_running=1)
    (job,) = await until(lambda: jobs_of(http, sweep), len)
    id = (await ctx.store.job(job["id"])).key
    await KeyStore(ctx.store.redis).revoke(id, now=time.time())
    await play(ctx, job["id"], [0.5])
    over = await ends(http, sweep)
    assert (over["state"], over["reason"]) == ("cancelled", f"its API key {id} is revoked")
    assert over["jobs"] == 1 and over["best"]["number"] == 0
