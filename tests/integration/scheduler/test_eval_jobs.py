"""Jobs of kind `eval`: the scheduler asks, rollout workers play, the job ends with what came of it, whoever dies."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from opentinker.cli.views.job_summary import doing
from opentinker.services.scheduler.jobs import eval_coordinator
from opentinker.services.scheduler.jobs.eval_coordinator import EvalCoordinator, Evaluation, read_results
from opentinker.shared.evaluation.validation_metrics import pass_at, validation_metrics
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import Ending, JobState, WeightVersion
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult
from opentinker.shared.types.manifest import MANIFEST, Manifest, start_of
from tests.conftest import soon, until
from tests.support.cluster import Cluster, toy_cluster
from tests.support.factories import make_result, make_spec, refusals
from tests.support.lineage import undocumented
from tests.support.scheduling import kinds, running

V = WeightVersion(0, 0)


def eval_spec(base: str = "m", **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": "look",
        "kind": "eval",
        "model": {"base": base},
        "environment": {"name": "copy_digits"},
        "rollout": {"engine": "toy", "max_tokens": 8},
        "evaluation": {"episodes": 8, "samples": 3, "temperature": 1.0, "transcripts": 2},
    }
    return parse_spec({name: part for name, part in {**fields, **changes}.items() if part is not None})


def result(index: int, reward: float = 1.0, job: str = "j", **changes: Any) -> EvalResult:
    fields: dict[str, Any] = {"version": V, "job": job, "reward": reward, "components": {"form": reward / 2}}
    return make_result(index, **(fields | changes))


# --- numbers --------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_choices_of_k_samples_in_which_one_solves_it() -> None:
    solved = [True, False, False, False, False, False, False, False, True, True, True, True]
    states = [0] * 4 + [1] * 4 + [2] * 4
    found = pass_at(solved, states, samples=4)
    for k in (1, 2, 4):
        tries = [any(choice) for s in (0, 4, 8) for choice in combinations(solved[s : s + 4], k)]
        assert found[f"val/pass/{k}"] == pytest.approx(sum(tries) / len(tries))
    assert means(found) == ["val/pass/1", "val/pass/2", "val/pass/4"]
    assert means(pass_at([True] * 3, [0] * 3, 3)) == ["val/pass/1", "val/pass/2", "val/pass/3"]
    short = pass_at([True], [0], samples=4)
    assert means(short) == ["val/pass/1"], "the others failed: there are no four to choose"
    assert short["val/pass/1"] == 1.0


def means(found: dict[str, float]) -> list[str]:
    return sorted(name for name in found if not name.endswith(("/low", "/high")))


def test_intervals_are_of_start_states_however_often_each_was_played() -> None:
    rewards = [0.75, 0.0, 0.75, 0.0, 0.0, 0.0]
    found = validation_metrics([result(i, r) for i, r in enumerate(rewards)], 6, samples=2, solved_at=0.5)
    assert (found["val/reward/mean"], found["val/pass/1"], found["val/pass/2"]) == pytest.approx((1 / 4, 1 / 3, 2 / 3))
    half = 1.959964 * math.sqrt(sum((m - 1 / 4) ** 2 for m in (0.375, 0.375, 0.0)) / 2 / 3)
    assert found["val/reward/high"] == pytest.approx(1 / 4 + half)
    assert found["val/component/form"] == pytest.approx(1 / 8)
    assert found["val/signal"] == pytest.approx(2 / 3), "the last state's episodes earned the same"
    assert "val/signal" not in validation_metrics([result(0, 1.0), result(1, 0.0)], 2)
    assert undocumented(found) == []


# --- the spec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": {"steps": 1}}, "train"),
        ({"validation": {"every": 5}}, "validation"),
        ({"algorithm": {"group_size": 4}}, "algorithm"),
        ({"serving": {"idle_s": 5}}, "serving"),
        ({"environment": None}, "environment"),
        ({"evaluation": {"samples": 2}}, "evaluation.samples"),
        ({"evaluation": {"top_p": 0.5}}, "evaluation.top_p"),
        ({"evaluation": {"temperature": 0.5}}, "evaluation.temperature"),
        ({"evaluation": {"episodes": 1000, "samples": 1000, "temperature": 1.0}}, "evaluation.episodes"),
        ({"rollout": {"engine": "toy", "seed": 3}}, "rollout.seed"),
        ({"rollout": {"engine": "toy", "oversample": 3}}, "rollout.oversample"),
        ({"model": {"base": "m", "lora": {}}}, "model.lora"),
        ({"resources": {"trainer_ranks": 2}}, "resources.trainer_ranks"),
        ({"start": {"from": "j-0123456789@5", "optimizer": True}}, "start.optimizer"),
    ],
)
def test_settings_that_an_eval_job_would_ignore_are_refused(changes: dict[str, Any], field: str) -> None:
    assert list(refusals(eval_spec, **changes)) == [field]


def test_stored_spec_has_the_parts_of_its_kind_and_is_read_again() -> None:
    spec = eval_spec()
    stored = spec.model_dump(mode="json")
    assert parse_spec(stored) == spec
    assert not {"train", "algorithm", "validation", "serving", "data"} & stored.keys()
    with pytest.raises(SpecError, match="evaluation"):
        make_spec(evaluation={"episodes": 3})


# --- one job, a worker made of words --------------------------------------------------------------------------------


class Asked:
    """A rollout worker's end: exams as they are stored, and results as the test wants them."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.bus, self.job = bus, job

    async def exams(self) -> list[EvalEpisode]:
        return await self.bus.stored(EXAM, job=self.job)

    async def hand_in(self, *results: EvalResult) -> list[bool]:
        return [(await self.bus.request(EXAM_RESULT, one, 60.0, job=self.job)).wanted for one in results]


async def started(ctx: Context, id: str, **changes: Any) -> Asked:
    await ctx.store.create_job(id=id, spec=eval_spec(**changes).model_dump(mode="json"), tenant="default")
    await ctx.store.transition(id, JobState.RUNNING)
    return Asked(ctx.bus, id)


async def test_the_next_scheduler_goes_on_with_what_has_a_result(ctx: Context) -> None:
    asked = await started(ctx, "j-nextone000")
    async with running(EvalCoordinator(ctx, UNFENCED, lost_s=0.2).run()):
        await until(asked.exams, lambda found: len(found) == 24)
        exams = await asked.exams()
        assert {exam.seed for exam in exams[:3]} == {exams[0].seed} != {exams[3].seed}
        done = [result(i, float(i % 3 == 0), asked.job) for i in range(20)]
        assert await soon(asked.hand_in(*done, done[0])) == [True] * 20 + [False]
        assert await soon(asked.hand_in(result(23, job=asked.job, version=WeightVersion(0, 7)))) == [False]
    path = ctx.settings.data_dir / "jobs" / asked.job / "results.jsonl"
    with path.open("ab") as file:
        file.write(b'{"job": "j-next')  # as of a process that was killed
    assert sorted(read_results(path, V)) == list(range(20))

    async with running(EvalCoordinator(ctx, UNFENCED, lost_s=0.2).run()):

        def rest(exams: list[Any]) -> bool:
            return [exam.index for exam in exams] == [20, 21, 22, 23]

        await until(asked.exams, rest)
        await ctx.bus.purge("EXAMS", EXAM.at(job=asked.job))  # nobody has them any more: they are asked for again
        await until(asked.exams, rest)
        await soon(asked.hand_in(*[result(i, float(i % 3 == 0), asked.job) for i in range(20, 24)]))
        await until(lambda: ctx.store.job(asked.job), lambda found: found.state.final)
    record = await ctx.store.job(asked.job)
    assert (record.state, record.step, record.steps) == (JobState.SUCCEEDED, 24, 24)
    found = orjson.loads(record.result)
    assert (found["version"], found["step"]) == ("0.0", 0)
    values = found["values"]
    assert (values["val/reward/mean"], values["val/pass/1"], values["val/pass/3"]) == pytest.approx((1 / 3, 1 / 3, 1.0))
    assert (values["val/episodes"], values["val/missing"]) == (24, 0)
    assert (await kinds(ctx.store, asked.job))[-2:] == ["validation", "succeeded"]


async def test_exams_name_the_version_of_the_checkpoint_that_was_kept(ctx: Context) -> None:
    place = start_of(ctx.settings.data_dir, "j-kept000000")
    place.mkdir(parents=True)
    version = WeightVersion(2, 40)
    (place / MANIFEST).write_bytes(msgspec.json.encode(Manifest(job="j-other00000", epoch=2, step=40, version=version)))
    one = {"evaluation": {"episodes": 1}, "start": {"from": "j-other00000@40"}}
    asked = await started(ctx, "j-kept000000", **one)
    broken = await started(ctx, "j-lost000000", **one)
    async with running(EvalCoordinator(ctx, UNFENCED).run()):
        await until(lambda: ctx.store.job(broken.job), lambda found: found.state == JobState.FAILED)
        await until(asked.exams, lambda found: [exam.version for exam in found] == [version])
        await soon(asked.hand_in(result(0, job=asked.job, version=version)))
        await until(lambda: ctx.store.job(asked.job), lambda found: found.state == JobState.SUCCEEDED)
    assert orjson.loads((await ctx.store.job(asked.job)).result)["step"] == 40
    assert "cannot be read" in (await ctx.store.job(broken.job)).reason


async def test_job_whose_episodes_fail_says_why_and_ends(ctx: Context) -> None:
    asked = await started(ctx, "j-failing000", evaluation={"episodes": 100})
    async with running(EvalCoordinator(ctx, UNFENCED).run()):
        await until(asked.exams, lambda found: len(found) == 100)
        bad = {"ending": Ending.ENV_ERROR, "error": "Traceback\nKeyError: 'board'", "sampled_by": []}
        await soon(asked.hand_in(*[result(i, 0.0, asked.job, **(bad if i % 3 else {})) for i in range(20)]))
        await until(lambda: ctx.store.job(asked.job), lambda found: found.state == JobState.FAILED)
        await until(asked.exams, lambda found: found == [])
    record = await ctx.store.job(asked.job)
    assert record.reason == (
        "13 of 20 episodes failed (rollout.max_failed_share is 0.5); last: env_error: KeyError: 'board'"
    )
    assert [one["episode"] for one in await ctx.store.failures(asked.job, 2)] == [19, 17]


async def test_results_that_cannot_be_read_end_the_job_and_not_the_scheduler(ctx: Context) -> None:
    (ctx.settings.data_dir / "jobs" / "j-unread0000" / "results.jsonl").mkdir(parents=True)
    asked = await started(ctx, "j-unread0000")
    async with running(EvalCoordinator(ctx, UNFENCED).run()):
        await until(lambda: ctx.store.job(asked.job), lambda found: found.state == JobState.FAILED)
    assert "cannot be read" in (await ctx.store.job(asked.job)).reason


async def test_an_evaluation_is_reported_once_by_all_leaders(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await started(ctx, "j-twice00000", evaluation={"episodes": 1})
    path = ctx.settings.data_dir / "jobs" / asked.job / "results.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(result(0, job=asked.job)) + b"\n")

    async def dies(*_: object, **__: object) -> None:
        raise Conflict("the next scheduler leads")

    record = await ctx.store.job(asked.job)
    with monkeypatch.context() as patched:
        patched.setattr(eval_coordinator, "end", dies)
        with pytest.raises(Conflict):
            await soon(Evaluation(ctx, UNFENCED, record, V).run())
    await soon(Evaluation(ctx, UNFENCED, record, V).run())
    assert (await ctx.store.job(asked.job)).state == JobState.SUCCEEDED
    assert (await kinds(ctx.store, asked.job)).count("validation") == 1
    assert len((path.parent / "validation.jsonl").read_bytes().splitlines()) == 1


def test_words_say_how_far_it_is() -> None:
    job = {"id": "j-1", "kind": "eval", "state": "running", "created": 0.0, "step": 3, "steps": 24, "reason": ""}
    assert doing(job)[0] == "It plays: 3 of 24 episodes have ended."
    assert doing({**job, "state": "queued"})[0] == "It is in the queue again, and continues after 3 episodes."
    assert doing({**job, "state": "cancelled"}) == ["It was cancelled after 3 of 24 episodes."]


# --- the whole system -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_eval_job_over_real_processes_ends_with_its_result_whoever_dies(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path, trainers=0, rollout_workers=2) as (cluster, model):
        slow = {"engine": "toy", "max_tokens": 8, "max_concurrent_groups": 4, "toy": {"seconds_per_token": 0.05}}
        job = await cluster.submit(eval_spec(str(model), rollout=slow, resources={"rollout_workers": 2}))
        await played(cluster, job, 3)
        cluster.kill("rollout_worker-0")
        await played(cluster, job, 6)
        cluster.kill("scheduler")
        record = await cluster.succeeds(job)
        values = record["result"]["values"]
        assert (record["step"], values["val/episodes"], values["val/failed"], values["val/missing"]) == (24, 24, 0, 0)
        points = await cluster.client.metrics(job)
        assert {p["source"] for p in points} >= {"validation"}
        assert undocumented({name for p in points for name in p["values"]}) == []
        causes = {one["cause"] for one in (await cluster.client.why(job))["causes"]}
        assert "generation" in causes and "evaluation" not in causes, causes
        found = await cluster.client.transcripts(job)
        assert [(one["state"], one["sample"]) for one in found["transcripts"]][:2] == [(0, 0), (0, 1)]
        argv = [sys.executable, "-m", "opentinker.cli", "job", job, "--url", cluster.client.url]
        for options, said in (([], "val/pass/3"), (["--json"], '"val/pass/3"')):
            told = await asyncio.to_thread(
                subprocess.run, argv + options, capture_output=True, text=True, env=cluster.env, check=True
            )
            assert said in told.stdout

        job = await cluster.submit(eval_spec(str(model), rollout={**slow, "toy": {"seconds_per_token": 30.0}}))
        await until(lambda: cluster.client.job(job), lambda found: found["state"] == "running")
        assert (await cluster.client.cancel(job))["state"] == "cancelled"
        again = await cluster.submit(eval_spec(str(model), resources={"rollout_workers": 2, "min_rollout_workers": 2}))
        assert (await cluster.wait(again))["state"] == "succeeded", "its workers are free"


async def played(cluster: Cluster, job: str, episodes: int) -> None:
    await until(lambda: cluster.client.job(job), lambda found: int(found["step"]) >= episodes)
