"""Evaluations: that one version of the weights plays them whole, and that they come to an end."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from opentinker.services.trainer import eval_scheduler
from opentinker.services.trainer.eval_scheduler import EvalScheduler
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.base import EmptySnapshot, SimulatedLearner
from opentinker.shared.evaluation.validation_metrics import validation_metrics
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Ending, Lease, Message, Pool, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult, exam_seed
from tests.conftest import WAIT_S, soon, until
from tests.support.factories import V0, make_result, make_spec
from tests.support.scheduling import kinds, messages, running

V = WeightVersion


class Trial:
    """A Validation over real servers; the test plays publisher and rollout workers."""

    def __init__(self, ctx: Context, spec: JobSpec, job: str = "") -> None:
        self.ctx, self.job = ctx, job or f"j-{uuid.uuid4().hex[:8]}"
        lease = Lease(job=self.job, worker="trainer-0", incarnation="i", epoch=1, pool=Pool.TRAINER)
        self.record = JobReporter(ctx, lease, spec, SimulatedLearner(spec))
        self.published: list[int] = []
        self.it = EvalScheduler(
            ctx, lease, spec.validation, self.record, lambda s: self.published.append(s.version.step),
            asleep_s=lambda: self.asleep_s,
        )  # fmt: skip
        self.asleep_s = 0.0

    async def offer(self, step: int) -> None:
        await self.it.offer(EmptySnapshot(version=V(1, step)))

    async def begin(self, exams: int = 0) -> None:
        """Version 0 is offered and served, and so many of its episodes are asked for."""
        await self.offer(0)
        self.it.served(V(1, 0))
        await self.asked(exams)

    async def exams(self) -> list[EvalEpisode]:
        return await self.ctx.bus.stored(EXAM, job=self.job)

    async def asked(self, count: int) -> list[EvalEpisode]:
        return await until(self.exams, lambda found: len(found) >= count)

    async def answer(self, *results: EvalResult) -> list[bool]:
        """As rollout workers do; whether they were wanted."""
        bus = self.ctx.bus
        return [(await bus.request(EXAM_RESULT, one, WAIT_S, job=self.job)).wanted for one in results]

    async def event(self, kind: str) -> dict[str, Any]:
        await until(lambda: kinds(self.ctx.store, self.job), lambda found: kind in found)
        return next(e for e in await self.ctx.store.events(self.job) if e["event"] == kind)


SURE: dict[str, Any] = {
    **{"algorithm__max_staleness": 0, "rollout__seed": 1, "train__deterministic": True, "train__learner": "torch"},
    "train__target": {"val/exact": 0.9},
}
"""Of a deterministic job that an evaluation may end."""


async def trial(ctx: Context, parts: dict[str, Any] | None = None, **plan: Any) -> Trial:
    """Of a job with these `parts` of its spec and this plan."""
    spec = make_spec(**(parts or {}), validation={"every": 4, "episodes": 2, "transcripts": 1, **plan})
    made = Trial(ctx, spec)
    await ctx.store.create_job(id=made.job, spec=spec.model_dump(mode="json"), tenant="default")
    return made


async def test_no_later_version_is_published_before_the_evaluation_is_over(ctx: Context) -> None:
    t = await trial(ctx)
    await t.offer(0)
    await t.offer(1)
    await t.offer(2)
    assert t.published == [0]
    async with running(t.it.run()):
        t.it.served(V(1, 0))
        exams = await t.asked(2)
        assert [(e.version, e.index, e.seed) for e in exams] == [(V(1, 0), i, exam_seed(0, i)) for i in (0, 1)]
        assert await t.answer(make_result(0, reward=1.0, messages=[Message(role="user", content="7=")])) == [True]
        assert t.published == [0]
        assert await t.answer(make_result(1, reward=0.0, metrics={"exact": 0.0})) == [True]
        await until(lambda: t.published == [0, 2])
        await t.offer(3)
        assert t.published == [0, 2, 3]
    said = await t.event("validation")
    assert (said["step"], said["episodes"], said["reward/mean"], said["exact"]) == (0, 2, 0.5, 0.5)
    (line,) = map(orjson.loads, (t.record.root.parent / "validation.jsonl").read_bytes().splitlines())
    assert (line["epoch"], line["step"], line["val/exact"]) == (1, 0, 0.5)
    kept = (t.record.root.parent / "transcripts" / "step-000000.jsonl").read_bytes().splitlines()
    assert [orjson.loads(one)["messages"] for one in kept] == [[{"role": "user", "content": "7="}]]


async def test_the_time_in_which_engines_sleep_does_not_count(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    t = await trial(ctx, timeout_s=60.0)
    now = 0.0
    monkeypatch.setattr(eval_scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    async with running(t.it.run()):
        await t.begin(2)
        t.asleep_s = now = 100.0
        await asyncio.sleep(2.0 * eval_scheduler.POLL_S)
        assert await t.answer(make_result(0)) == [True], "it has not ended"
        now = 161.0
        said = await t.event("validation_incomplete")
    assert said["missing"] == 1


async def test_the_event_of_an_evaluation_says_how_many_games_were_won(ctx: Context) -> None:
    t = await trial(ctx)
    await t.offer(0)
    async with running(t.it.run()):
        t.it.served(V(1, 0))
        await t.asked(2)
        await t.answer(make_result(0, outcome=0.5), make_result(1, outcome=0.0))
        said = await t.event("validation")
    assert said["winrate"] == 0.25 and not any(name.startswith("winrate/") for name in said)


async def test_games_against_a_policy_count_for_the_weights_that_played_them(ctx: Context) -> None:
    """Two opponents, two episodes against each; the policy makes steps meanwhile."""
    against = [{"bot": "random"}, {"policy": "b"}]
    plan = {"every": 4, "episodes": 2, "transcripts": 0, "against": against}
    parts = {"policies": {"a": {}, "b": {}}, "seats": {"first": "a", "second": "b"}, "environment__name": "kuhn_poker"}
    spec = make_spec(**parts, validation=plan)
    t = Trial(ctx, spec)
    await ctx.store.create_job(id=t.job, spec=spec.model_dump(mode="json"), tenant="default")
    record = JobReporter(ctx, t.it.lease, spec, SimulatedLearner(spec), policy="a")
    record.joint.restore("a", 4)
    record.joint.restore("b", 9)
    it = EvalScheduler(ctx, t.it.lease, spec.validation, record, lambda _: None)
    assert it.plan is not None
    played = [
        *(make_result(place, outcome=1.0) for place in (0, 1)),
        make_result(2, outcome=1.0, opponent=V(1, 6)),
        make_result(3, outcome=0.5, opponent=V(1, 8)),
    ]
    assert it._players(played) == {"random": "bot:random", "b": {"b@1.6": (1, 0, 0), "b@1.8": (0, 1, 0)}}
    failed = make_result(3, ending=Ending.ENV_TIMEOUT)
    assert it._players([*played[:2], make_result(2, outcome=0.0), failed])["b"] == {"b@1.9": (0, 0, 1)}, (
        "an older worker's"
    )
    values = validation_metrics(played, 2, opponents=["random", "b"])
    await record.evaluations.add(V(1, 4), values, {}, it._players(played))
    expected = {("a@1.4", "bot:random"): (2, 0, 0), ("a@1.4", "b@1.6"): (1, 0, 0), ("a@1.4", "b@1.8"): (0, 1, 0)}
    assert record.joint.ratings.results() == expected
    again = JobReporter(ctx, t.it.lease, spec, SimulatedLearner(spec), policy="a")
    again.evaluations.restore({1: 0}, 4)
    assert again.joint.ratings.results() == expected, "the trainer after a restart knows them"


async def test_job_of_before_without_an_opponent_but_a_pool_fails_with_the_reason(ctx: Context) -> None:
    """No longer accepted; the exams would end every rollout worker that plays them."""
    seats = {"first": "a", "second": "b", "judge": {"pool": "past"}}
    spec = make_spec(
        policies={"a": {}, "b": {}},
        seats=seats,
        pools={"past": {"policy": "a", "every": 2}},
        environment__name="debate",
        rollout__engine="toy",
        validation={"every": 4, "against": [{"policy": "b"}]},
    )
    lease = Trial(ctx, make_spec()).it.lease
    for policy, problem in (("b", "has no opponent for policy 'b' but itself"), ("a", None)):
        record = JobReporter(ctx, lease, spec, SimulatedLearner(spec), policy=policy)
        it = EvalScheduler(ctx, lease, spec.validation, record, lambda _: None)
        if problem is None:
            async with running(it.run()) as task:
                await asyncio.sleep(0.05)
                assert not task.done()
        else:
            with pytest.raises(JobFailed, match=problem):
                await asyncio.wait_for(it.run(), 5)


async def test_a_trainer_that_waits_for_the_last_evaluation_says_so_every_second(ctx: Context) -> None:
    """Or it would be called silent, and maybe killed."""
    t = await trial(ctx)
    parts = await messages(ctx.bus, TIMELINE, job=t.job, worker=ctx.worker)
    async with running(t.it.run()), running(t.record.lanes.run()), running(t.it.finish(4)) as finishing:
        t.it.served(V(1, 4))
        await t.asked(2)
        said = await until(lambda: [one for part in parts for one in part.segments], lambda found: len(found) >= 2)
        await t.answer(make_result(0, V(1, 4)), make_result(1, V(1, 4)))
        assert await soon(finishing)
    assert {(one.lane, one.kind, one.version) for one in said} == {("training", "wait", str(V(1, 4)))}
    assert said[1].start == said[0].end


async def test_version_that_is_due_waits_for_the_evaluation_before_it(ctx: Context) -> None:
    t = await trial(ctx, every=1)
    async with running(t.it.run()):
        await t.begin()
        async with running(t.offer(1)) as offering:
            await t.asked(2)
            assert t.published == [0] and not offering.done()
            await t.answer(make_result(0), make_result(1))
            await soon(offering)
        t.it.served(V(1, 1))
        await until(t.exams, lambda found: {e.version for e in found} >= {V(1, 1)})
        assert t.published[-1] == 1


async def test_results_of_other_weights_are_repeated(ctx: Context) -> None:
    t = await trial(ctx)
    t.it.lost_after_s = 0.0
    async with running(t.it.run()):
        await t.begin(2)
        await ctx.bus.purge("EXAMS", EXAM.at(job=t.job))  # as if they had been taken
        answers = [
            make_result(0, sampled_by=[V(1, 0), V(1, 1)]),
            make_result(0, V(0, 9)),
            make_result(1),
            make_result(1),
        ]
        assert await t.answer(*answers) == [False, False, True, False]
        assert [e.index for e in await t.asked(1)] == [0]
        assert await t.answer(make_result(0)) == [True]
        await t.event("validation")


async def test_evaluation_that_takes_too_long_ends_and_says_so(ctx: Context) -> None:
    t = await trial(ctx)
    async with running(t.it.run()):
        await t.begin(2)
        await t.answer(make_result(0))
        await t.offer(1)
        assert t.it.plan is not None
        t.it.plan = t.it.plan.model_copy(update={"timeout_s": 0.0})  # the time is over
        said = await t.event("validation_incomplete")
        assert (said["episodes"], said["missing"]) == (1, 1)
        await until(lambda: t.published == [0, 1])
        assert await t.exams() == [], "nobody plays them any more"
        assert t.record.evaluations.last == {}, "no target looks at half an evaluation"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([make_result(0)], r"step 0: 1 of 2 episodes .* within validation\.timeout_s"),
        (
            [make_result(0), make_result(1, ending=Ending.ENV_TIMEOUT, error="30 s")],
            r"step 0: episode 1 .*env_timeout: 30 s",
        ),
        ([make_result(0), make_result(1, ending=Ending.ENV_ERROR, error="it raised")], ""),
    ],
    ids=["timed out", "failed by luck", "fails always"],
)
async def test_deterministic_jobs_ignore_targets_of_timing(ctx: Context, answers: list[EvalResult], why: str) -> None:
    t = await trial(ctx, SURE)
    evaluating = asyncio.create_task(t.it.run())
    await t.begin(2)
    await t.answer(*answers)
    assert t.it.plan is not None
    if len(answers) < 2:
        t.it.plan = t.it.plan.model_copy(update={"timeout_s": 0.0})  # the time is over
    if why:
        with pytest.raises(JobFailed, match=why):
            await soon(evaluating)
    else:
        assert await soon(t.it.over()) and not evaluating.done()
    evaluating.cancel()
    await asyncio.wait([evaluating])


@pytest.mark.parametrize("parts", [{}, SURE], ids=["", "deterministic"])
async def test_last_evaluation_ends_without_any_rollout_worker(ctx: Context, parts: dict[str, Any]) -> None:
    """Of a deterministic job it may be incomplete too: nothing depends on it any more."""
    t = await trial(ctx, parts, at_start=False, timeout_s=0.2)
    async with running(t.it.run()):
        await t.offer(3)
        assert await soon(t.it.finish(3))
    assert (await t.event("validation_incomplete"))["missing"] == 2


async def test_last_weights_are_evaluated_once(ctx: Context) -> None:
    t = await trial(ctx, at_start=False)
    async with running(t.it.run()):
        await t.offer(5)
        t.it.served(V(1, 5))
        async with running(t.it.finish(5)) as finishing:
            await t.asked(2)
            assert not finishing.done()
            await t.answer(make_result(0, V(1, 5)), make_result(1, V(1, 5)))
            assert await soon(finishing)
        assert await soon(t.it.finish(5))
    assert (await kinds(ctx.store, t.job)).count("validation") == 1


async def test_exams_of_an_earlier_trainer_are_withdrawn(ctx: Context) -> None:
    t = await trial(ctx)
    await ctx.bus.publish(EXAM, EvalEpisode(job=t.job, version=V(0, 8), index=0, seed=1), f"{t.job}/old", job=t.job)
    async with running(t.it.run()):
        await until(t.exams, lambda found: found == [])


async def test_what_was_evaluated_on_the_way_to_a_checkpoint_is_known_after_a_restart(ctx: Context) -> None:
    t = await trial(ctx)
    for step in (0, 4, 8):
        await t.record.evaluations.add(V(1, step), validation_metrics([make_result(0, reward=step / 8)], 1), {})
    again = Trial(ctx, t.record.spec, t.job).record.evaluations
    again.restore({1: 0, 2: 5}, 5)
    assert again.steps == {0, 4} and again.last["val/reward/mean"] == 0.5


async def test_evaluation_that_a_restart_has_cut_off_is_said(ctx: Context) -> None:
    t = await trial(ctx)
    await t.record.evaluations.add(V0, validation_metrics([make_result(0)], 1), {})
    await t.it.resumed(4)
    await t.it.resumed(2)
    assert "validation_incomplete" not in await kinds(ctx.store, t.job)
    await t.it.resumed(6)
    assert (await t.event("validation_incomplete"))["step"] == 4


async def test_target_of_a_validation_metric_is_its_last_value(ctx: Context) -> None:
    t = await trial(ctx)
    spec = make_spec(validation={"every": 4}, train__target={"val/exact": 0.9, "reward/mean": 0.1})
    record = Trial(ctx, spec, t.job).record
    assert record.target_uses_evaluation and not t.record.target_uses_evaluation
    record._window.extend([{"reward/mean": 0.5}] * 10)
    for exact, met in ((0.0, False), (1.0, True)):
        values = validation_metrics([make_result(0, metrics={"exact": exact})], 1)
        await record.evaluations.add(V(1, 4), values, record.spec.train.target)
        assert record.target_met() == met
    await record.evaluations.add(V(1, 8), validation_metrics([make_result(0, metrics={})], 1), {"val/exactt": 1.0})
    assert (await t.event("target_metric_absent"))["metrics"] == ["val/exactt"]
