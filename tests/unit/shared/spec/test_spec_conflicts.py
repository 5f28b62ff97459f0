"""Settings that need others or exclude them: frozen models, validation, rules for artifacts."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import parse_spec, read_stored
from opentinker.shared.spec.frozen_models import is_scored
from tests.support.factories import SMALLEST, refusals

DETERMINISTIC = {"rollout": {"seed": 1}, "train": {"steps": 1, "deterministic": True}}
SIMULATED = {"steps": 1, "learner": "simulated"}
TOY = {"rollout": {"engine": "toy"}, "train": SIMULATED}
JUDGES = {"reward_models": [{"base": "j"}]}
TEACHER = {"teacher": {"base": "t"}}
PPO = {"algorithm": {"name": "ppo"}, "value_model": {"base": "v"}}


def test_a_reward_model_has_a_name_and_puts_reference_forward_in_the_path() -> None:
    judges = [{"base": "models/My Judge/"}, {"base": "owner/judge", "weight": 0.0}, {"base": "x", "name": "third"}]
    spec = parse_spec({**SMALLEST, "reward_models": judges})
    assert [judge.name for judge in spec.reward_models] == ["My-Judge", "judge", "third"]
    stored = spec.model_dump(mode="json")
    assert parse_spec(stored) == spec and is_scored(stored) and not is_scored(parse_spec(SMALLEST).model_dump())


def test_a_value_model_takes_the_critic_s_place_and_puts_reference_forward_in_the_path() -> None:
    spec = parse_spec({**SMALLEST, **PPO})
    assert (spec.algorithm.critic_lr, spec.algorithm.value_clip) == (None, None)
    assert (spec.algorithm.gamma, spec.algorithm.lam) == (1.0, 0.95)
    stored = spec.model_dump(mode="json")
    assert parse_spec(stored) == spec and is_scored(stored)
    assert not is_scored(parse_spec({**SMALLEST, **PPO, "value_model": None}).model_dump())
    several = {"train": {"steps": 1, "parallel": "zero3"}, "resources": {"trainer_ranks": 2}}
    assert parse_spec({**SMALLEST, **PPO, **several}).train.parallel == "zero3", "no critic is in the way"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": {"name": "distill"}}, {"teacher"}),
        ({"algorithm": {"distill_coef": 0.1}}, {"teacher"}),
        (TEACHER, {"algorithm.distill_coef"}),
        ({"teacher": {"base": ""}, "algorithm": {"name": "distill"}}, {"teacher.base"}),
        ({**TEACHER, "algorithm": {"name": "distill", "clip_low": "x"}}, {"algorithm.clip_low"}),
        ({**TEACHER, "train": SIMULATED}, {"teacher"}),
        ({"algorithm": {"name": "distill"}, "train": SIMULATED}, {"algorithm.name"}),
        (
            {**TEACHER, **DETERMINISTIC, "algorithm": {"name": "distill", "max_staleness": 0}},
            {"algorithm.distill_coef"},
        ),
        ({"reward_models": [{"base": "a/judge"}, {"base": "b/judge"}]}, {"reward_models.1.name"}),
        ({"reward_models": [{"base": "j", "weight": "x"}]}, {"reward_models.0.weight"}),
        ({"reward_models": [{"base": "j", "weight": float("inf")}]}, {"reward_models.0.weight"}),
        ({**JUDGES, "train": SIMULATED}, {"reward_models"}),
        ({**JUDGES, **TEACHER, "algorithm": {"name": "distill"}}, {"reward_models"}),
        ({**JUDGES, **DETERMINISTIC, "algorithm": {"max_staleness": 0}}, {"reward_models"}),
        ({**PPO, "algorithm": {"name": "grpo"}}, {"value_model"}),
        ({**PPO, "algorithm": {"name": "ppo", "advantage": "rloo"}}, {"value_model"}),
        ({**PPO, "train": SIMULATED}, {"value_model"}),
        ({**PPO, "algorithm": {"name": "ppo", "critic_lr": 1e-5}}, {"algorithm.critic_lr"}),
        (
            {**PPO, "algorithm": {"name": "ppo", "critic_lr": 1e-3, "value_clip": 0.1}},
            {"algorithm.critic_lr", "algorithm.value_clip"},
        ),
        ({**PPO, "value_model": {"base": ""}}, {"value_model.base"}),
        ({**PPO, "value_model": {"base": "v", "weight": 1.0}}, {"value_model.weight"}),
        ({**PPO, "kind": "sft", "data": {"path": "d.jsonl"}}, {"environment", "algorithm", "value_model"}),
        ({**PPO, **DETERMINISTIC, "algorithm": {"name": "ppo", "max_staleness": 0}}, {"value_model"}),
        ({"validation": {"every": 5, "top_p": 0.5}}, {"validation.top_p"}),
        ({"validation": {"every": 5, "top_k": 5}}, {"validation.top_k"}),
        ({"validation": {"every": 0}}, {"validation.every"}),
        ({**TOY, "validation": {"every": 5, "temperature": 0.5}}, {"validation.temperature"}),
        ({"train": {"steps": 1, "target": {"val/exact": 0.5}}}, {"train.target.val/exact"}),
        ({"artifacts": {"keep_all": True, "keep_last": 3}}, {"artifacts.keep_last"}),
        ({"artifacts": {"keep_best": 1}}, {"artifacts.best_metric"}),
        ({"artifacts": {"best_metric": "loss"}}, {"artifacts.best_metric"}),
        ({"artifacts": {"best_is": "lowest"}}, {"artifacts.best_is"}),
        ({"artifacts": {"keep_best": 1, "best_metric": "val/exact"}}, {"artifacts.best_metric"}),
    ],
)
def test_what_is_missing_or_would_be_ignored_is_refused(changes: dict[str, Any], named: set[str]) -> None:
    assert refusals(parse_spec, {**SMALLEST, **changes}).keys() == named


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rollout": {"seed": 1}, "train": {"steps": 1, "deterministic": True, "rewind_on": ["kl"]}},
            "cannot be exact",
        ),
        ({"train": {"steps": 1, "rewind_on": ["reward_clif"]}}, "did you mean 'reward_cliff'"),
        ({"train": {"steps": 1, "rewind_on": ["nonfinite"]}}, "did you mean 'non_finite'"),
        ({"train": {"steps": 1, "rewind_on": ["kl"], "rewinds": 0}}, "1"),
    ],
)
def test_a_job_that_cannot_go_back_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert any(reason in problem for problem in refusals(parse_spec, {**SMALLEST, **changes}).values())


def test_jobs_of_rows_and_of_several_policies_cannot_go_back() -> None:
    rows = {"kind": "sft", "model": {"base": "x"}, "data": {"train": "rows.jsonl"}}
    rows = {"name": "x", "kind": "sft", "model": {"base": "m"}, "data": {"path": "rows.jsonl"}}
    two = {
        "environment": {"name": "signalling"},
        "rollout": {"engine": "toy"},
        "policies": {"speaker": {}, "listener": {}},
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    train = {"steps": 1, "rewind_on": ["non_finite"]}
    assert "'sft'" in refusals(parse_spec, {**rows, "train": train})["train.rewind_on"]
    assert "policies" in refusals(parse_spec, {**SMALLEST, **two, "train": train})["train.rewind_on"]
    spec = parse_spec({**SMALLEST, "train": {"steps": 70, "rewind_on": ["kl", "non_finite"]}})
    assert spec.train.rewinds == 3 and parse_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("train", "field", "reason"),
    [
        ({"rewind_on": ["entropy"], "checkpoint_every": 5}, "keep_checkpoints", "at least 5 "),
        ({"rewind_on": ["entropy"], "checkpoint_every": 9, "keep_checkpoints": 2}, "keep_checkpoints", "at least 4 "),
        ({"rewind_on": ["kl", "non_finite"], "steps": 69}, "checkpoint_every", "at most 49 in a job of 69"),
        ({"rewind_on": ["kl"], "steps": 20, "checkpoint_every": 1, "keep_checkpoints": 20}, "steps", "more than 20"),
        ({"rewind_on": ["non_finite"], "steps": 50}, "checkpoint_every", "below the 50 steps"),
        ({"rewind_on": ["kl"], "alarms": {"kl": 0}}, "rewind_on", "'kl' never rings: train.alarms.kl is 0"),
        ({"rewind_on": ["kl", "entropy"], "entropy_alarm": 0}, "rewind_on", "train.entropy_alarm is 0"),
        ({"rewind_on": ["reward_cliff"], "collapse_alarm": 0}, "rewind_on", "train.collapse_alarm is 0"),
        ({"rewind_on": ["non_finite"], "learner": "simulated"}, "rewind_on", "learner = 'simulated'"),
    ],
)
def test_a_rewind_that_could_never_happen_is_refused_at_submission(
    train: dict[str, Any], field: str, reason: str
) -> None:
    data = {**SMALLEST, "train": {"steps": 100, **train}}
    refused = refusals(parse_spec, data)
    assert refused.keys() == {f"train.{field}"} and reason in refused[f"train.{field}"]
    assert read_stored(data).train.rewind_on == train["rewind_on"], "a job that was accepted once is read"


def test_an_alarm_that_the_algorithm_silences_makes_no_job_go_back() -> None:
    taught = {"algorithm": {"advantage": "per_turn"}, "train": {"steps": 100, "rewind_on": ["zero_variance"]}}
    assert "equal rewards" in refusals(parse_spec, {**SMALLEST, **taught})["train.rewind_on"]


@pytest.mark.parametrize(("every", "keep"), [(50, 3), (10, 2), (5, 4), (1, 20)])
def test_a_rewind_that_may_happen_is_accepted(every: int, keep: int) -> None:
    kept = {"checkpoint_every": every, "keep_checkpoints": keep}
    assert parse_spec({**SMALLEST, "train": {"steps": 20 + every, "rewind_on": ["kl"], **kept}})
    assert parse_spec({**SMALLEST, "train": {"steps": 1 + every, "rewind_on": ["non_finite"], **kept}})
