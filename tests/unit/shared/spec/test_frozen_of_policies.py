"""Teachers, value models and critics of a job with several policies: who has which, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.frozen_models import is_scored
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import JobRecord, JobState
from tests.unit.shared.spec.signalling_job import BASE, refused

DISTILL = {"algorithm": {"name": "distill"}}
PPO = {"algorithm": {"name": "ppo"}}
TEACHER, VALUES = {"teacher": {"base": "t"}}, {"value_model": {"base": "v"}}
SIMULATED = {"train": {"steps": 10, "learner": "simulated"}}


def policies(speaker: dict[str, Any], listener: dict[str, Any]) -> dict[str, Any]:
    return {"policies": {"speaker": speaker, "listener": listener}}


def bases(spec: JobSpec, part: str) -> list[str | None]:
    found = [getattr(spec_of(spec, name), part) for name in spec.policies]
    return [model and model.base for model in found]


def again(spec: JobSpec) -> None:
    """It is the same spec for every reader of a stored one, also for the ranks of one policy."""
    assert parse_spec(spec.model_dump(mode="json")) == spec
    for name in spec.policies:
        own = spec_of(spec, name)
        assert parse_spec(own.model_dump(mode="json")) == own


@pytest.mark.parametrize(
    ("changes", "teachers"),
    [
        ({**TEACHER, **DISTILL}, ["t", "t"]),
        ({**TEACHER, **policies(DISTILL, {})}, ["t", None]),
        (policies({**DISTILL, "teacher": {"base": "own"}}, {}), ["own", None]),
        (
            {**TEACHER, **policies({**DISTILL, "teacher": {"base": "own"}}, {"algorithm": {"distill_coef": 0.5}})},
            ["own", "t"],
        ),
    ],
)
def test_a_policy_learns_from_its_own_teacher_or_from_the_job_s(changes: dict[str, Any], teachers: list[str]) -> None:
    algorithm = {**BASE["algorithm"], **changes.get("algorithm", {})}
    spec = parse_spec({**BASE, **changes, "algorithm": algorithm})
    assert bases(spec, "teacher") == teachers and is_scored(spec.model_dump(mode="json"))
    again(spec)


def test_each_policy_has_its_own_share_of_the_teacher_s_word() -> None:
    owns = policies(DISTILL, {"algorithm": {"distill_coef": 0.25}})
    spec = parse_spec({**BASE, **TEACHER, **owns})
    assert [policy.algorithm.distill_coef for policy in spec.policies.values()] == [1.0, 0.25]
    job = {"group_size": 4, "distill_coef": 0.5}
    spec = parse_spec({**BASE, **TEACHER, "algorithm": job, **policies({}, {"algorithm": {"distill_coef": 0.0}})})
    assert bases(spec, "teacher") == ["t", None]


@pytest.mark.parametrize(
    ("changes", "models", "critics"),
    [
        (policies(PPO, PPO), [None, None], [True, True]),
        ({**VALUES, **policies(PPO, {})}, ["v", None], [False, False]),
        ({**VALUES, "algorithm": {"name": "ppo", "group_size": 4}, **policies({}, {})}, ["v", "v"], [False, False]),
        (
            {**VALUES, "algorithm": {"name": "ppo", "group_size": 4}, **policies({}, {"algorithm": {"name": "grpo"}})},
            ["v", None],
            [False, False],
        ),
        (policies({**PPO, **VALUES}, PPO), ["v", None], [False, True]),
        ({**VALUES, **policies({**PPO, "value_model": {"base": "own"}}, PPO)}, ["own", "v"], [False, False]),
        ({**VALUES, **policies(PPO, {**PPO, "trains_critic": True})}, ["v", None], [False, True]),
    ],
)
def test_a_policy_has_a_value_model_or_trains_a_critic(
    changes: dict[str, Any], models: list[str | None], critics: list[bool]
) -> None:
    spec = parse_spec({**BASE, **changes})
    assert bases(spec, "value_model") == models
    assert [spec_of(spec, name).algorithm.critic_lr is not None for name in spec.policies] == critics
    assert is_scored(spec.model_dump(mode="json")) == any(models)
    again(spec)


def test_a_critic_s_settings_in_the_job_are_for_the_policies_that_train_one() -> None:
    algorithm = {**BASE["algorithm"], "name": "ppo", "critic_lr": 1e-4}
    for owns in (policies(VALUES, {}), {**VALUES, **policies({}, {"trains_critic": True})}):
        spec = parse_spec({**BASE, "algorithm": algorithm, **owns})
        assert [spec_of(spec, name).algorithm.critic_lr for name in spec.policies] == [None, 1e-4]


def test_the_record_of_a_policy_has_its_models() -> None:
    plain = parse_spec({**BASE, **TEACHER, **policies(DISTILL, {**PPO, **VALUES})}).model_dump(mode="json")
    said: dict[str, Any] = {name: "" for name in ("name", "kind", "tenant", "reason")}
    counted: dict[str, Any] = {name: 0 for name in ("version", "epoch", "created", "updated", "step", "steps")}
    job = JobRecord(id="j", state=JobState.RUNNING, spec=plain, **said, **counted)
    speaker, listener = (parse_spec(job.part(name).spec) for name in ("speaker", "listener"))
    assert speaker.teacher is not None and speaker.value_model is None
    assert listener.teacher is None and listener.value_model is not None


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (policies(DISTILL, {}), {"teacher": "distill_coef of speaker: [teacher], or [policies.speaker.teacher]"}),
        (TEACHER, {"teacher": "no policy has algorithm.distill_coef above 0"}),
        ({**TEACHER, **policies({**DISTILL, "teacher": {"base": "own"}}, {})}, {"teacher": "would be ignored"}),
        (policies(TEACHER, {}), {"policies.speaker.algorithm.distill_coef": "[policies.speaker.teacher] would be"}),
        (policies({**DISTILL, "teacher": {"base": ""}}, {}), {"policies.speaker.teacher.base": "1 character"}),
        (
            {
                **TEACHER,
                **policies(DISTILL, {"train": {"lr": "x"}}),
                "reward_models": [{"base": "j", "policies": ["listener"]}],
            },
            {"policies.listener.train.lr": "number"},
        ),
        (VALUES, {"value_model": "no policy has algorithm.advantage = 'gae'"}),
        (policies(VALUES, {}), {"policies.speaker.value_model": "advantage = 'grpo' takes no values"}),
        (
            policies({"trains_critic": True}, {}),
            {"policies.speaker.trains_critic": "needs algorithm.advantage = 'gae'"},
        ),
        (policies({**PPO, **VALUES, "trains_critic": True}, {}), {"policies.speaker.trains_critic": "is frozen"}),
        (
            {**VALUES, **policies({"algorithm": {"name": "ppo", "critic_lr": 1e-4}}, {})},
            {"policies.speaker.algorithm.critic_lr": "no critic is trained"},
        ),
        (
            {
                "algorithm": {"group_size": 4, "name": "ppo", "value_clip": 0.1},
                **policies(VALUES, VALUES),
            },
            {"algorithm.value_clip": "no critic is trained"},
        ),
        (
            {**SIMULATED, **TEACHER, **VALUES, **policies({**DISTILL, **TEACHER}, {**VALUES})},
            {
                "teacher": "simulated",
                "value_model": "simulated",
                "policies.speaker.algorithm.name": "simulated",
            },
        ),
        ({**SIMULATED, **policies({"teacher": {"base": "own"}}, {})}, {"policies.speaker.teacher": "simulated"}),
        (
            {
                "train": {"steps": 10, "deterministic": True},
                "algorithm": {"group_size": 4, "max_staleness": 0},
                "rollout": {"engine": "toy", "seed": 1},
                **TEACHER,
                **policies({"algorithm": {"name": "distill", "max_staleness": 0}}, {**PPO, **VALUES}),
            },
            {
                "policies.speaker.algorithm.distill_coef": "must be 0: reference-forward",
                "policies.listener.value_model": "must be none: reference-forward",
            },
        ),
        (
            {**TEACHER, **policies(DISTILL, {}), "reward_models": [{"base": "j", "policies": ["speaker", "listener"]}]},
            {"reward_models.0.policies": "advantage = 'none' does not look at rewards"},
        ),
        (
            {**TEACHER, **policies(DISTILL, DISTILL), "reward_models": [{"base": "j"}]},
            {"reward_models": "advantage = 'none' does not look at rewards"},
        ),
    ],
)
def test_what_is_missing_or_would_be_ignored_is_refused(changes: dict[str, Any], problems: dict[str, str]) -> None:
    found = refused(**changes)
    assert found.keys() == problems.keys(), found
    assert all(problem in found[field] for field, problem in problems.items()), found


def test_a_reward_model_scores_a_member_of_a_team_whoever_learns_from_the_teacher() -> None:
    """Its score is part of the team's reward, from which the listener learns."""
    team = {"algorithm": {"team": {"all": ["speaker", "listener"]}}}
    judge = {"reward_models": [{"base": "j", "policies": ["speaker"]}]}
    spec = parse_spec({**BASE, **TEACHER, **judge, **policies(DISTILL, team)})
    assert [len(spec_of(spec, name).reward_models) for name in spec.policies] == [1, 0]


def test_every_mistake_is_reported_at_once() -> None:
    found = refused(
        **policies({**DISTILL, **VALUES}, {"algorithm": {"name": "ppo", "critic_lr": 1e-4}, **TEACHER, **VALUES}),
        reward_models=[{"base": "j", "policies": ["speaker", "nobody"]}],
    )
    assert found.keys() == {
        "teacher",
        "policies.speaker.value_model",
        "policies.listener.algorithm.critic_lr",
        "policies.listener.algorithm.distill_coef",
        "reward_models.0.policies",
    }


@pytest.mark.parametrize("everyone", [True, False])
def test_a_shared_trainer_takes_policies_with_value_models_and_no_critics(everyone: bool) -> None:
    job = {
        **BASE,
        "model": {"base": "m", "lora": {}},
        "resources": {"trainer": "shared"},
        **policies({**PPO, **VALUES}, {**PPO, **(VALUES if everyone else {})}),
    }
    if everyone:
        parse_spec(job)
        return
    found = refused(**job)
    assert found.keys() == {"policies.listener.algorithm.advantage"}
    assert "set [value_model], or" in found["policies.listener.algorithm.advantage"]
