"""Sweeps over HTTP: what they submit, and how they end. Jobs are played by the test."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from opentinker.client import AsyncClient
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict
from tests.conftest import until
from tests.support.api import SPEC, Http, fits, mistakes
from tests.support.sweeps import SKILL, SKILLS, ends, jobs_of, play, play_all, skill, submitted, swept


async def test_a_grid_makes_ordinary_jobs_and_ends_with_the_best(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, max_running=2)
    first = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 2)
    assert [job["tags"] for job in first] == [[sweep]] * 2
    assert first[0]["name"] == f"{SPEC['name']} #0 skill=0.1"

    over = await play_all(ctx, http, sweep, lambda spec: [skill(spec)] * 3)
    assert (over["state"], over["trials"], over["jobs"]) == ("succeeded", {"finished": 3}, 3)
    assert over["best"] == {"number": 2, "value": pytest.approx(0.7), "settings": {SKILL: 0.7}}
    assert [trial["settings"][SKILL] for trial in over["all_trials"]] == SKILLS
    assert [job["state"] for job in await jobs_of(http, sweep)] == ["succeeded"] * 3
    assert over["spec"]["sweep"]["metric"] == "reward/mean"
    _, page = await http("GET", "/v1/sweeps?limit=1")
    fits(page, api_types.Sweeps)
    assert [one["id"] for one in page["sweeps"]] == [sweep] and not page["more"]


async def test_a_trial_is_the_mean_of_its_seeds(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, seeds=[1, 2], parameters={SKILL: [0.1, 0.2]}, goal="minimize")
    over = await play_all(ctx, http, sweep, lambda spec: [skill(spec) * spec["rollout"]["seed"]])
    assert [trial["value"] for trial in over["all_trials"]] == pytest.approx([0.15, 0.3])
    assert over["best"]["number"] == 0
    assert [job["seed"] for job in over["all_trials"][0]["jobs"]] == [1, 2]
    assert [job["value"] for job in over["all_trials"][0]["jobs"]] == pytest.approx([0.1, 0.2])
    names = {job["name"].partition("#")[2] for job in await jobs_of(http, sweep)}
    assert names == {f"{n} skill={value} seed={seed}" for n, value in enumerate((0.1, 0.2)) for seed in (1, 2)}


@pytest.mark.parametrize("method", ["random", "tpe"])
async def test_search_finds_a_good_value_and_says_which_setting_matters(http: Http, ctx: Context, method: str) -> None:
    parameters = {SKILL: {"low": 1e-3, "high": 1, "log": True}, "algorithm.group_size": [4, 8]}
    sweep = await submitted(http, method=method, trials=14, max_running=7, seed=3, parameters=parameters)
    over = await play_all(ctx, http, sweep, lambda spec: [1 - abs(skill(spec) - 0.3)])
    assert over["trials"] == {"finished": 14} and over["best"]["value"] > 0.9
    assert over["importance"][SKILL] > over["importance"]["algorithm.group_size"]
    assert sum(over["importance"].values()) == pytest.approx(1.0)


async def test_a_cancelled_sweep_cancels_its_jobs_and_a_deleted_one_their_artifacts(
    http: Http, ctx: Context, client: AsyncClient
) -> None:
    sweep = await submitted(http)
    await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    status, body = await http("DELETE", f"/v1/sweeps/{sweep}")
    assert status == 409 and "cancel it first" in body["detail"]
    status, body = await http("POST", f"/v1/sweeps/{sweep}/cancel")
    assert (status, body["state"]) == (200, "cancelled")
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: all(job["state"] == "cancelled" for job in jobs))
    assert jobs[0]["reason"] == f"cancelled by sweep {sweep}: cancelled by request"
    _, body = await until(lambda: http("DELETE", f"/v1/sweeps/{sweep}"), lambda answer: answer[0] == 200)
    fits(body, api_types.DeletedSweep)
    assert set(body["jobs"]) == {job["id"] for job in jobs}
    assert all(job["deleted"] for job in await jobs_of(http, sweep))
    assert (await http("GET", f"/v1/sweeps/{sweep}"))[0] == 404


async def test_trials_below_the_median_are_stopped_early(http: Http, ctx: Context) -> None:
    rule = {"rule": "median", "min_steps": 2, "min_trials": 2}
    sweep = await submitted(http, early_stopping=rule)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    for job, value in zip(jobs[1:], (0.8, 0.9), strict=True):
        await play(ctx, job["id"], [value] * 2, JobState.RUNNING)
    await play(ctx, jobs[0]["id"], [0.1] * 2, JobState.RUNNING)
    stopped = await until(lambda: ctx.store.job(jobs[0]["id"]), lambda job: job.state.final)
    assert stopped.state is JobState.CANCELLED
    assert "reward/mean 0.1 at step 2 is worse than the median of 2 other trials" in stopped.reason
    for job in jobs[1:]:
        await play(ctx, job["id"], [0.8], first=3)
    over = await ends(http, sweep)
    assert over["trials"] == {"stopped": 1, "finished": 2} and over["best"]["number"] == 2


async def test_a_spent_budget_ends_the_sweep_and_its_jobs(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, max_hours=1e-5)
    over = await ends(http, sweep)
    assert (over["state"], over["reason"]) == ("succeeded", "its budget is spent: max_hours = 1e-05")
    await until(lambda: jobs_of(http, sweep), lambda jobs: all(job["state"] == "cancelled" for job in jobs))


async def test_a_budget_of_jobs_ends_a_grid_after_its_first_trials(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, max_jobs=2)
    over = await play_all(ctx, http, sweep, lambda spec: [skill(spec)])
    assert (over["state"], over["reason"]) == ("succeeded", "its budget is spent: max_jobs = 2")
    assert (over["planned"], over["jobs"], over["best"]["number"]) == (2, 2, 1)


@pytest.mark.parametrize(
    "written",
    [
        {**swept(), "kind": "sweep"},
        {**SPEC, "kind": "sweep", "sweep": {**swept()["sweep"], "kind": "rl"}},
        swept(),
    ],
    ids=["kind", "kind and that of the jobs", "table alone"],
)
async def test_a_sweep_is_submitted_among_jobs_too(http: Http, ctx: Context, written: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": "once"}
    status, made = await http("POST", "/v1/jobs", json=written, headers=headers)
    assert status == 201, made
    fits(made, api_types.SweepSummary)
    assert (made["kind"], made["planned"]) == ("rl", 3)
    for path in ("/v1/jobs", "/v1/sweeps"):
        async with http.session.post(f"{http.url}{path}", json=written, headers=headers) as again:
            assert again.headers["Location"] == f"/v1/sweeps/{made['id']}"
            assert again.headers["Idempotency-Replayed"] == "true" and (await again.json())["id"] == made["id"]
    over = await play_all(ctx, http, made["id"], lambda spec: [skill(spec)])
    assert over["best"]["number"] == 2 and over["spec"]["kind"] == "rl"
    assert {job["kind"] for job in await jobs_of(http, made["id"])} == {"rl"}
    status, same = await http("POST", "/v1/sweeps", json=over["spec"])
    assert (status, same["planned"]) == (201, 3), "what the server shows of a sweep can be submitted again"


async def test_a_key_that_made_a_job_makes_no_sweep_and_the_reverse(http: Http) -> None:
    async def submit(key: str, spec: dict[str, Any]) -> tuple[int, str]:
        status, made = await http("POST", "/v1/jobs", json=spec, headers={"Idempotency-Key": key})
        return status, made.get("detail", made.get("id"))

    _, job = await submit("a", SPEC)
    _, sweep = await submit("b", swept())
    for key, spec, made in (("a", swept(), f"job {job}"), ("b", SPEC, f"sweep {sweep}")):
        status, detail = await submit(key, spec)
        assert status == 409 and f"was used for {made} with another body" in detail


async def test_a_job_and_a_sweep_that_are_stored_at_the_same_time_do_not_share_a_key(http: Http, ctx: Context) -> None:
    """Both requests have passed the first check."""
    sweeps = SweepStore(ctx.store.redis)
    first = await sweeps.sweep(await submitted(http))

    def job(id: str, key: str) -> Awaitable[str]:
        return ctx.store.create_job(id=id, spec=SPEC, tenant=first.tenant, idempotency=key, body_hash="x")

    await sweeps.create(msgspec.structs.replace(first, id="s-0123456789"), "a", "x")
    with pytest.raises(Conflict, match="was used for sweep s-0123456789"):
        await job("j-0123456789", "a")
    await job("j-9876543210", "b")
    with pytest.raises(Conflict, match="was used for job j-9876543210"):
        await sweeps.create(msgspec.structs.replace(first, id="s-9876543210"), "b", "x")


async def test_mistakes_of_a_sweep_among_jobs_name_their_field(http: Http) -> None:
    for table, field in (({}, "sweep"), ({"sweep": {**swept()["sweep"], "kind": "inference"}}, "sweep.kind")):
        spec = {**SPEC, **table, "kind": "sweep"}
        status, body = await http("POST", "/v1/jobs", json=spec)
        assert status == 422 and set(mistakes(body)) == {field}
        _, told = await http("POST", "/v1/validate?scope=spec", json=spec)
        assert [one["field"] for one in told["mistakes"]] == [field]


async def test_a_budget_of_worker_seconds_counts_all_jobs(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, max_worker_s=10, max_running=2)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 2)
    for job in jobs:
        await ctx.store.redis.hset(f"spent:job:{job['id']}", "worker_s", 6)
    over = await ends(http, sweep)
    assert over["reason"] == "its budget is spent: max_worker_s = 10" and over["worker_s"] == 12


async def test_a_job_that_its_user_cancels_ends_its_trial_alone(http: Http, ctx: Context) -> None:
    sweep = await submitted(http)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    await http("POST", f"/v1/jobs/{jobs[0]['id']}/cancel")
    for job in jobs[1:]:
        await play(ctx, job["id"], [0.5])
    over = await ends(http, sweep)
    assert over["trials"] == {"cancelled": 1, "finished": 2} and over["best"]["number"] == 1


async def test_no_more_jobs_are_submitted_after_five_have_failed(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, max_running=1, parameters={SKILL: [n / 10 for n in range(9)]})
    over = await play_all(ctx, http, sweep, lambda _: [0.5], JobState.FAILED)
    assert (over["state"], over["jobs"]) == ("failed", 5)
    assert over["reason"] == "none of 5 trials has a value: boom"


async def test_a_sweep_without_a_value_fails_and_says_why(http: Http, ctx: Context) -> None:
    sweep = await submitted(http, metric="solved", parameters={SKILL: [0.1]})
    jobs = await until(lambda: jobs_of(http, sweep), len)
    await play(ctx, jobs[0]["id"], [0.5])
    over = await ends(http, sweep)
    assert over["state"] == "failed"
    why = "its job reported no metric solved (it reported: reward/mean)"
    assert over["reason"] == f"none of 1 trials has a value: {why}"


async def test_a_failed_trial_does_not_end_the_others(http: Http, ctx: Context) -> None:
    sweep = await submitted(http)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    await play(ctx, jobs[0]["id"], [0.5], JobState.FAILED)
    for job in jobs[1:]:
        await play(ctx, job["id"], [0.5])
    over = await ends(http, sweep)
    assert over["trials"] == {"failed": 1, "finished": 2} and over["all_trials"][0]["reason"] == "boom"


async def test_an_equal_request_with_the_same_key_makes_one_sweep(http: Http) -> None:
    headers = {"Idempotency-Key": "once"}
    answers = [await http("POST", "/v1/sweeps", json=swept(), headers=headers) for _ in range(2)]
    assert answers[0][1]["id"] == answers[1][1]["id"]
    status, _ = await http("POST", "/v1/sweeps", json=swept(max_running=1), headers=headers)
    assert status == 409


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"parameters": {"rollout": {"toy": {"skil": [1]}}}}, "sweep.parameters.rollout.toy.skil"),
        ({"parameters": {SKILL: {"low": 2, "high": 1}}}, f"sweep.parameters.{SKILL}.high"),
        ({"parameters": {SKILL: [1e-4, -1]}}, f"sweep.parameters.{SKILL}"),
        ({"parameters": {"resources.priority": [0, 11]}}, "sweep.parameters.resources.priority"),
        ({"method": "random"}, "sweep.trials"),
        ({"parameters": {SKILL: 0.1}}, f"sweep.parameters.{SKILL}"),
        ({"max_running": 65}, "sweep.max_running"),
        ({"unknown": 1}, "sweep.unknown"),
    ],
)
async def test_mistakes_are_reported_with_their_field(http: Http, table: dict[str, Any], field: str) -> None:
    status, body = await http("POST", "/v1/sweeps", json=swept(**table))
    assert status == 422 and set(mistakes(body)) == {field}
    assert (await http("GET", "/v1/sweeps"))[1]["sweeps"] == []
