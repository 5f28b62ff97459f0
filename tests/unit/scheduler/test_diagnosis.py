"""The breakdown of a job's time, and the findings about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.diagnosis.advice import STALLS
from opentinker.services.scheduler.diagnosis.findings import findings_on_learning, findings_on_time
from opentinker.services.scheduler.diagnosis.holders import Holder
from opentinker.services.scheduler.diagnosis.time_by_cause import seconds_by_cause
from opentinker.services.scheduler.diagnosis.waits import WAITS, Wait, waits_of
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Pool
from opentinker.shared.types.telemetry import Segment
from tests.support.factories import make_spec


def seg(lane: str, kind: str, start: float, end: float, level: float = 1.0) -> Segment:
    return Segment(lane=lane, kind=kind, start=start, end=end, level=level)


def test_every_second_has_one_cause_and_what_the_trainer_does_comes_first() -> None:
    found = seconds_by_cause(
        [
            seg("training", "step", -5.0, 2.0), seg("training", "wait", 2.0, 9.0),
            seg("training", "checkpoint", 9.0, 10.0),
            seg("swap", "load", 2.0, 3.0), seg("generation", "rollout", 0.0, 5.0, 3.0),
            seg("env", "rollout", 4.0, 5.0, 1.0), seg("env", "turn", 4.0, 5.0, 0.5),
            seg("reference", "score", 4.0, 6.0, 64.0), seg("generation", "evaluation", 6.5, 7.0),
        ],
        since=0.0, until=12.0,
    )  # fmt: skip
    assert found == pytest.approx(
        {
            "training": 2.0, "swap": 1.0, "generation": 1.75, "environment turns": 0.125,
            "waiting for env workers": 0.125, "reference": 1.0, "evaluation": 0.5, "checkpoint": 1.0, "nothing": 4.5,
        }
    )  # fmt: skip
    assert sum(found.values()) == pytest.approx(12.0)
    assert seconds_by_cause([], 0.0, 3.0) == {"nothing": 3.0}


@pytest.mark.parametrize("kind", ["transfer", "publish"])
def test_the_transfer_of_weights_hides_no_generation_that_goes_on(kind: str) -> None:
    """Only pause, load and resume stop the engines; `publish` is the whole time from the trainer's side."""
    moved = [seg("swap", kind, 0.0, 30.0), seg("generation", "rollout", 0.0, 20.0, 8.0)]
    assert seconds_by_cause(moved, 0.0, 40.0) == {"generation": 20.0, "swap": 10.0, "nothing": 10.0}
    scored = [seg("swap", kind, 0.0, 30.0), seg("reference", "score", 0.0, 30.0)]
    assert seconds_by_cause(scored, 0.0, 30.0) == {"reference": 30.0}
    joined = [seg("swap", "join", 0.0, 8.0), seg("generation", "rollout", 0.0, 5.0)]
    assert seconds_by_cause(joined, 0.0, 8.0) == {"generation": 5.0, "forming the weight group": 3.0}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("sleep", "engines fall asleep or wake"),
        ("wake", "engines fall asleep or wake"),
        ("find", "looking for rollout workers"),
    ],
)
def test_a_step_that_waits_for_engines_is_not_generation(kind: str, cause: str) -> None:
    """Requests of an engine that sleeps are still under way."""
    found = seconds_by_cause([seg("swap", kind, 2.0, 10.0), seg("generation", "rollout", 0.0, 10.0, 8.0)], 0.0, 10.0)
    assert found == {"generation": 2.0, cause: 8.0}
    assert "rollout workers (resources" not in advice_on(cause, make_spec())


def test_calls_of_evaluations_are_not_those_of_training() -> None:
    """One episode of training waits for a place that 64 of evaluations occupy with their turns."""
    found = seconds_by_cause(
        [
            seg("env", "rollout", 0.0, 65.0), seg("env", "evaluation", 0.0, 65.0, 64.0),
            seg("env", "turn", 0.0, 65.0, 32.0),
        ],
        0.0, 65.0,
    )  # fmt: skip
    assert found == pytest.approx(
        {"evaluation": 64.0, "environment turns": 32 / 65, "waiting for env workers": 33 / 65}
    )


def test_evaluations_are_the_work_of_an_eval_job() -> None:
    played = [
        seg("generation", "evaluation", 0.0, 4.0, 2.0), seg("env", "evaluation", 2.0, 10.0, 2.0),
        seg("env", "turn", 2.0, 10.0, 1.5),
    ]  # fmt: skip
    found = seconds_by_cause(played, 0.0, 10.0, is_eval=True)
    assert found == pytest.approx({"generation": 3.0, "environment turns": 5.25, "waiting for env workers": 1.75})
    assert seconds_by_cause(played, 0.0, 10.0) == {"evaluation": 10.0}


def test_the_validation_of_rows_is_no_training() -> None:
    rows = {"name": "t", "kind": "sft", "model": {"base": "m"}, "data": {"path": "rows.jsonl"}, "train": {"steps": 1}}
    played = [seg("training", "step", 0.0, 2.0), seg("training", "evaluation", 2.0, 10.0)]
    assert seconds_by_cause(played, 0.0, 10.0) == {"training": 2.0, "validation": 8.0}
    assert "data.validate_every" in advice_on("validation", parse_spec(rows))


def test_waits_for_other_jobs_are_not_the_job_s_own_work() -> None:
    """A step in a shared trainer says at its end how long it waited; groups wait for a pass of frozen models."""
    found = seconds_by_cause(
        [
            seg("training", "step", 0.0, 10.0), seg("training", "queue", 2.0, 10.0),
            seg("reference", "queue", 9.0, 30.0), seg("reference", "score", 28.0, 32.0),
            seg("generation", "rollout", 9.0, 12.0),
        ],
        0.0, 32.0,
    )  # fmt: skip
    assert found == pytest.approx(
        {
            "training": 2.0, "waiting for other jobs' training": 8.0, "generation": 2.0,
            "waiting for frozen models": 16.0, "reference": 4.0,
        }
    )  # fmt: skip
    assert 'resources.trainer = "own"' in advice_on("waiting for other jobs' training", make_spec())
    assert "kl_coef" not in advice_on("waiting for frozen models", make_spec())


def test_a_version_that_is_gathered_is_no_idle_time() -> None:
    copied = [seg("training", "step", 0.0, 2.0), seg("swap", "snapshot", 2.0, 9.0), seg("swap", "publish", 9.0, 10.0)]
    expected = {"training": 2.0, "copying the version": 7.0, "swap": 1.0}
    assert seconds_by_cause(copied, 0.0, 10.0) == pytest.approx(expected)
    assert "zero2" not in advice_on("copying the version", make_spec())


def test_many_overlapping_segments_leave_nothing_behind() -> None:
    many = [seg("generation", "rollout", n * 0.01, n * 0.01 + 0.5, 0.1) for n in range(1000)]
    found = seconds_by_cause(many, 0.0, 20.0)
    assert found == pytest.approx({"generation": 10.49, "nothing": 9.51})


TRAINER = Holder("trainer-0", Pool.TRAINER, 0.5)
STALLED = [kind for kind, what in WAITS.items() if what in STALLS]


def rollout(worker: str, silent_s: float = 0.0, loading_s: float = 0.0) -> Holder:
    return Holder(worker, Pool.ROLLOUT, silent_s, loading_s)


@pytest.mark.parametrize(
    ("seconds", "holders", "what", "advice"),
    [
        ({"generation": 9.0, "training": 1.0}, (), "90 % of the time: generation", "more rollout workers"),
        ({"training": 9.0, "nothing": 1.0}, (TRAINER,), "90 % of the time: training", "resources.trainer_ranks"),
        ({"environment turns": 5.0, "training": 5.0}, (), "50 % of the time: environment turns", "more env workers"),
        ({"nothing": 5.0, "training": 9.0}, (TRAINER, rollout("b", 40.0)), "silent: b for 40 s", "opentinker logs"),
        ({"nothing": 5.0}, (), "no worker holds it (starting)", "what it waits for"),
        ({"nothing": 5.0, "training": 9.0}, (TRAINER,), "36 % of the time no worker was busy", "larger batches"),
        (
            {"loading": 118.0, "nothing": 2.0},
            (rollout("a", loading_s=118.0), Holder("t", Pool.TRAINER, loading_s=3.0), rollout("c", 1.0)),
            "98 % of the time: loading, now: a for 118 s, t for 3 s",
            "opentinker logs JOB -f",
        ),
        ({"loading": 60.0}, (TRAINER,), "100 % of the time: loading", "warm_engine_s"),
    ],
)
def test_time_has_words(seconds: dict[str, float], holders: tuple[Holder, ...], what: str, advice: str) -> None:
    found = list(findings_on_time(seconds, holders, "starting", make_spec()))
    assert any(what in one.what and advice in one.advice for one in found), found


@pytest.mark.parametrize(
    ("holders", "named"),
    [
        ((TRAINER, rollout("a", 1.0), rollout("b", 10_800.0)), "silent while others work: b for 10800 s"),
        ((Holder("t", Pool.TRAINER, 300.0), rollout("a", 1.0)), "silent while others work: t for 300 s"),
        ((TRAINER, rollout("a", 1.0), rollout("b", 90.0)), ""),
        ((TRAINER, rollout("a", 300.0), rollout("b", 310.0)), ""),
        ((TRAINER, rollout("a", loading_s=300.0)), ""),
    ],
)
def test_who_is_silent_while_others_work_is_named(holders: tuple[Holder, ...], named: str) -> None:
    """Rollout workers may all wait for a step that takes longer than the time that is looked at."""
    found = list(findings_on_time({"training": 119.0, "nothing": 1.0}, holders, "running", make_spec()))
    assert [one.what for one in found] == ["99 % of the time: training", *filter(None, [named])]


TICKETS, EXAMS = WAITS["generation", "tickets"], WAITS["generation", "exams"]


@pytest.mark.parametrize(("kind", "what"), [("rl", TICKETS), ("eval", EXAMS)])
def test_a_rollout_worker_without_episodes_is_not_silent_beside_one_that_plays_the_last(kind: str, what: str) -> None:
    eval_job = {"name": "t", "kind": "eval", "model": {"base": "m"}, "environment": {"name": "copy_digits"}}
    spec = make_spec() if kind == "rl" else parse_spec(eval_job)
    trainer = [TRAINER] * (kind == "rl")
    waits = [Wait("trainer-0", WAITS["training", "wait"], 130.0)] * (kind == "rl") + [Wait("b", what, 125.0)]
    holders = [*trainer, rollout("a", 0.5), rollout("b", 0.5)]
    (generated, last) = findings_on_time({"generation": 120.0}, holders, "running", spec, waits)
    assert "generation" in generated.what and last.what.startswith("the last episodes are played by a; waiting: ")
    assert f"b for {what}, for 125 s" in last.what and ("rollout.oversample" in last.advice) == (kind == "rl")
    busy = [one for one in findings_on_time({"training": 120.0}, holders, "running", spec, waits[1:])]
    assert [one.what for one in busy if "last episodes" in one.what] == [] or kind == "eval", "it waits for a step"
    short = [Wait("b", what, 4.0)]
    assert len(list(findings_on_time({"generation": 120.0}, holders, "running", spec, short))) == 1


def test_workers_that_all_wait_are_named_with_what_they_wait_for() -> None:
    waits = [Wait("trainer-0", WAITS["training", "wait"], 41.0), Wait("a", TICKETS, 40.0)]
    idle = {"waiting for tickets": 40.0, "generation": 80.0}
    generated, found = findings_on_time(idle, [TRAINER, rollout("a", 1.0)], "running", make_spec(), waits)
    assert "67 % of the time: generation" in generated.what
    assert found.what.startswith(
        "33 % of the time no worker was busy with the job; now all of them wait: trainer-0 for"
    )
    assert found.what.endswith("a for tickets, for 40 s") and "opentinker status" in found.advice


@pytest.mark.parametrize(("lane", "kind"), STALLED)
def test_a_wait_that_no_healthy_job_has_for_long_is_found_while_others_work(lane: str, kind: str) -> None:
    what = WAITS[lane, kind]
    (_, found) = findings_on_time({"training": 9.0}, [TRAINER], "running", make_spec(), [Wait("w", what, 31.0)])
    assert found.what == f"waiting: w for {what}, for 31 s" and found.advice


def test_a_worker_waits_while_it_does_nothing_else_and_since_its_first_report_of_it() -> None:
    def waits(*own: Segment) -> list[Wait]:
        return waits_of({"w": own}, 100.0)

    later = msgspec.structs.replace(seg("generation", "tickets", 98.0, 99.5), since=20.0)
    assert waits(later) == [Wait("w", TICKETS, 80.0)], "its first parts are older than what is looked at"
    assert waits(seg("generation", "tickets", 90.0, 95.0), seg("generation", "tickets", 96.0, 99.5)) == [
        Wait("w", TICKETS, 10.0)
    ]
    assert waits(seg("generation", "rollout", 80.0, 90.0), later) == [Wait("w", TICKETS, 80.0)]
    assert waits(later, seg("env", "rollout", 99.0, 99.5)) == [], "it plays"
    assert waits(seg("training", "wait", 90.0, 99.5), seg("swap", "publish", 98.0, 99.5)) == []
    assert waits(seg("generation", "tickets", 20.0, 40.0)) == [], "it is silent"


def test_what_idle_workers_wait_for_comes_last() -> None:
    found = seconds_by_cause(
        [
            seg("generation", "weights", 0.0, 4.0), seg("loading", "loading", 0.0, 3.0),
            seg("generation", "tickets", 4.0, 9.0, 2.0), seg("generation", "rollout", 5.0, 6.0),
            seg("training", "wait", 0.0, 9.0), seg("reference", "loading", 6.0, 7.0),
        ],
        0.0, 10.0,
    )  # fmt: skip
    assert found == {
        "loading": 3.0, "waiting for the first weights": 1.0, "waiting for tickets": 3.0, "generation": 1.0,
        "waiting for frozen models": 1.0, "nothing": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"zero_variance": 0.95, "reward/mean": 0.1}, "nothing is learned"),
        ({"zero_variance": 1.0, "reward/mean": 1.0, "reward/max": 1.0}, "nothing is learned"),
        ({"zero_variance": 0.95, "exact": 1.0}, "nearly all groups are solved"),
        ({"entropy": 0.001, "reward/mean": 0.3}, "gives the same answer each time"),
        ({"mismatch/mean": 0.05}, "different logprobs"),
        ({"collapse/alarm": 1.0}, "has collapsed"),
        ({"collapse/alarm": 1.0, "alarm/entropy": 1.0, "entropy": 0.001}, "alarm/entropy, entropy 0.001"),
        ({"alarm/reward_cliff": 1.0, "reward/mean": 0.1}, "off a cliff"),
        ({"alarm/zero_variance": 1.0, "zero_variance": 0.97}, "zero_variance 0.97"),
        ({"alarm/length_drift": 1.0, "response_length/mean": 90.0}, "change their length"),
        ({"alarm/kl": 1.0, "ratio/k3": 0.3}, "ratio/k3 0.3"),
        ({"alarm/ratio_tails": 1.0, "ess": 0.1}, "long tails"),
        ({"stop/length": 0.9}, "cut off"),
        ({"clip_share": 0.4}, "too stale"),
        ({"failed/env_error": 3.0, "failed/prompt": 1.0}, "4 groups have failed, most by env_error"),
    ],
)
def test_learning_has_words(values: dict[str, float], what: str) -> None:
    spec = make_spec()
    found = list(findings_on_learning(values, spec))
    assert len(found) == 1 and what in found[0].what and found[0].advice
    of_policy = {f"speaker/{name}": value for name, value in values.items()}
    assert list(findings_on_learning(of_policy, spec)) == []
    policies = make_spec(policies={"speaker": {}, "listener": {}}, seats={"speaker": "speaker", "listener": "listener"})
    (told,) = findings_on_learning(of_policy, policies, "speaker")
    assert told.what == f"speaker: {found[0].what}"
    usual = {"reward/mean": 0.5, "entropy": 1.0, "zero_variance": 0.2, "ess": 0.9}
    assert list(findings_on_learning(usual, spec)) == []


TORCH = {"learner": "torch", "steps": 3}


def advice_on(cause: str, spec: JobSpec) -> str:
    (found,) = findings_on_time({cause: 9.0}, [TRAINER], "running", spec)
    return found.advice


@pytest.mark.parametrize(
    ("cause", "changes", "said", "unsaid"),
    [
        ("training", {"train": TORCH}, "LoRA", "gradient_checkpointing"),
        ("training", {"train": TORCH, "model__lora": {}}, "resources.trainer_ranks", "LoRA"),
        (
            "training",
            {"train": TORCH | {"gradient_checkpointing": True}},
            "gradient_checkpointing = false",
            "staleness",
        ),
        (
            "training",
            {"train": TORCH, "model__lora": {}, "resources": {"trainer": "shared"}},
            "fewer tokens",
            "trainer_ranks",
        ),
        ("checkpoint", {"train": TORCH, "model__lora": {}}, "train.checkpoint_every", "LoRA"),
        ("swap", {"train": TORCH, "model__lora": {}}, "a faster path", "LoRA"),
        ("generation", {}, "algorithm.max_staleness", "LoRA"),
        (
            "generation",
            {"train": TORCH | {"deterministic": True}, "algorithm__max_staleness": 0, "rollout__seed": 0},
            "rollout.max_tokens",
            "max_staleness",
        ),
        ("reference", {"algorithm__kl_coef": 0.1}, "algorithm.kl_coef = 0", "teacher"),
        (
            "reference",
            {"algorithm": {"name": "distill"}, "teacher": {"base": "t"}, "train": TORCH},
            "a smaller [teacher]",
            "kl_coef",
        ),
        (
            "reference",
            {"reward_models": [{"name": "judge", "base": "t"}], "train": TORCH},
            "[[reward_models]]",
            "kl_coef",
        ),
        ("nothing", {}, "a higher algorithm.max_staleness", "max_concurrent_groups"),
    ],
)
def test_advice_leaves_out_what_the_job_has(cause: str, changes: dict[str, Any], said: str, unsaid: str) -> None:
    advice = advice_on(cause, make_spec(**changes))
    assert said in advice and unsaid not in advice, advice


def test_advice_for_jobs_without_episodes_or_training_has_their_words() -> None:
    rows = {"name": "t", "kind": "sft", "model": {"base": "m"}, "data": {"path": "rows.jsonl"}, "train": {"steps": 1}}
    assert advice_on("nothing", parse_spec(rows)) == "short pauses: larger batches"
    plays = {"name": "t", "kind": "eval", "model": {"base": "m"}, "environment": {"name": "copy_digits"}}
    spec = parse_spec(plays)
    assert "max_staleness" not in advice_on("generation", spec) and "rollout workers" in advice_on("generation", spec)
    assert advice_on("nothing", spec) == "short pauses: a larger rollout.max_concurrent_groups"


@pytest.mark.parametrize(
    ("values", "changes", "said", "unsaid"),
    [
        ({"alarm/kl": 1.0}, {"algorithm__max_staleness": 0}, "a lower train.lr; bound: train.alarms.kl", "staleness"),
        (
            {"alarm/ratio_tails": 1.0},
            {"algorithm": {"loss": "ppo", "correction": "tis", "proximal": "recomputed"}},
            "max_staleness",
            "algorithm.correction",
        ),
        ({"alarm/zero_variance": 1.0}, {}, "a larger algorithm.group_size, or an SFT start", "unless"),
        (
            {"alarm/zero_variance": 1.0},
            {"algorithm": {"name": "reinforce_pp", "group_size": 1}},
            "shaped rewards",
            "group_size",
        ),
        ({"zero_variance": 1.0, "reward/mean": 1.0, "reward/max": 100.0}, {}, "unless the task is learned", "end the"),
        ({"zero_variance": 1.0, "reward/mean": 1.0}, {"train__target": {"reward/mean": 0.9}}, "end the job", "easier"),
        ({"zero_variance": 1.0, "reward/mean": 1.0}, {"train__target": {"reward/mean": 90.0}}, "an easier", "unless"),
        ({"zero_variance": 1.0, "reward/mean": 1.0, "exact": 0.2}, {}, "an easier start", "unless"),
    ],
)
def test_words_on_learning_know_the_spec(
    values: dict[str, float], changes: dict[str, Any], said: str, unsaid: str
) -> None:
    changes = {"train": TORCH, **changes} if "train__target" not in changes else changes
    (found,) = findings_on_learning(values, make_spec(**changes))
    assert said in found.advice and unsaid not in found.advice, found


@pytest.mark.parametrize(
    ("algorithm", "rewards", "is_told"),
    [
        ({"name": "reinforce_pp", "group_size": 1}, (0.0, 1.0), False),
        ({"name": "ppo", "group_size": 8}, (0.0, 1.0), False),
        ({"name": "ppo", "group_size": 8}, (0.0, 0.0), True),
        ({"name": "grpo", "group_size": 8}, (0.0, 1.0), True),
        ({"name": "distill"}, (0.0, 0.0), False),
        ({"advantage": "per_turn", "group_size": 8}, (1.0, 1.0), False),
    ],
)
def test_equal_groups_are_told_where_they_teach_nothing(
    algorithm: dict[str, Any], rewards: tuple[float, float], is_told: bool
) -> None:
    low, high = rewards
    values = {"zero_variance": 1.0, "reward/mean": high / 3, "reward/min": low, "reward/max": high}
    teacher = {"teacher": {"base": "t"}} if algorithm.get("name") == "distill" else {}
    found = list(findings_on_learning(values, make_spec(algorithm=algorithm, train=TORCH, **teacher)))
    assert ["nothing is learned" in one.what for one in found] == [True] * is_told
