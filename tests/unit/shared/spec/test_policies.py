"""[policies] of a spec: what is inherited, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.algorithm_parts import GROUP_BASELINES
from opentinker.shared.spec.frozen_models import is_scored
from opentinker.shared.spec.matches.policies import OWN_METRICS, spec_of, with_job_settings
from opentinker.shared.spec.matches.seats import MAX_POLICIES
from tests.unit.shared.spec.signalling_job import BASE, refused

METRICS_PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_policies_have_the_job_s_settings_where_they_say_nothing() -> None:
    job = {**BASE["algorithm"], "name": "dapo", "clip_high": 0.3}
    policies = {"speaker": {"train": {"lr": 1e-4}}, "listener": {"algorithm": {"name": "rloo"}, "model": {"base": "n"}}}
    spec = parse_spec({**BASE, "algorithm": job, "policies": policies})
    speaker, listener = spec_of(spec, "speaker"), spec_of(spec, "listener")
    assert (speaker.train.lr, speaker.train.steps, listener.train.lr) == (1e-4, 10, 1e-3)
    assert (speaker.model.base, listener.model.base) == ("m", "n")
    assert (speaker.algorithm.name, speaker.algorithm.clip_high) == ("dapo", 0.3)
    own = listener.algorithm
    assert (own.name, own.clip_high, own.group_size) == ("rloo", 0.2, 4), "options of another preset are not inherited"
    assert spec_of(spec, "") is spec
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_a_job_is_scored_if_a_policy_of_it_has_a_reference() -> None:
    def scored(job: float, **policies: float) -> bool:
        tables = {name: {"algorithm": {"kl_coef": kl}} for name, kl in policies.items()}
        algorithm = {**BASE["algorithm"], "kl_coef": job}
        return is_scored(parse_spec({**BASE, "algorithm": algorithm, "policies": tables}).model_dump(mode="json"))

    assert scored(0.0, speaker=0.0, listener=0.1) and not scored(0.0, speaker=0.0, listener=0.0)
    assert not scored(0.1, speaker=0.0, listener=0.0), "no policy has the job's setting"
    assert is_scored({"algorithm": {"kl_coef": 0.1}}) and not is_scored({})


def test_a_policy_starts_from_a_checkpoint_of_its_own() -> None:
    spec = parse_spec({**BASE, "policies": {"speaker": {"start": {"from": "j-0123456789~a@5"}}, "listener": {}}})
    starts = [spec_of(spec, name).start for name in spec.policies]
    assert starts[0] is not None and starts[0].checkpoint == "j-0123456789~a@5" and starts[1] is None
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_a_policy_is_not_named_as_metrics_of_a_job_begin() -> None:
    rows = [line.split("|")[1] for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `")]
    begins = {name.partition("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row) if "/" in name}
    assert {"val", "reward", "trainer"} < begins <= OWN_METRICS
    found = refused(policies={"val": {}, "reward": {}}, seats={"speaker": "val", "listener": "reward"})
    assert found.keys() == {"policies.val", "policies.reward"} and "another name" in found["policies.val"]


def test_adapters_are_inherited_setting_by_setting() -> None:
    model = {"base": "m", "lora": {"rank": 8, "alpha": 16.0}}
    spec = parse_spec(
        {**BASE, "model": model, "policies": {"speaker": {"model": {"lora": {"rank": 4}}}, "listener": {}}}
    )
    assert [(p.model.lora.rank, p.model.lora.alpha) for p in spec.policies.values() if p.model.lora] == [
        (4, 16.0),
        (8, 16.0),
    ]


def test_a_reward_model_scores_all_policies_or_those_that_it_names() -> None:
    judges = [{"base": "all"}, {"base": "one", "policies": ["listener"], "weight": -1.0}]
    spec = parse_spec({**BASE, "policies": {"speaker": {}, "listener": {}}, "reward_models": judges})
    assert [judge.name for judge in spec_of(spec, "speaker").reward_models] == ["all"]
    assert [judge.name for judge in spec_of(spec, "listener").reward_models] == ["all", "one"]
    assert is_scored(spec.model_dump(mode="json"))
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_every_mistake_is_reported_at_once() -> None:
    found = refused(
        policies={"speaker": {"train": {"steps": 4}}, "listener": {"algorithm": {"group_size": 8}}, "third": {}},
        seats={"speaker": "speaker", "listener": "lisener"},
        start={"from": "j-0123456789@5"},
    )
    assert found.keys() == {
        "policies.speaker.train.steps",
        "policies.listener.algorithm.group_size",
        "seats.listener",
        "seats",
        "start",
    }
    assert "its policies are: speaker, listener, third" in found["seats.listener"]


def test_mistakes_in_a_policy_make_no_others_and_hide_none() -> None:
    """What names policies is judged by those that there are, with their own settings as far as they are right."""
    wrong = {"train": {"lrr": 3, "steps": 20}, "algorithm": {"groups_per_batch": 2}, "reference": 1}
    found = refused(
        policies={"speaker": wrong, "listener": 3, "Third": {}, "idle": {}},
        seats={"speaker": "speaker", "listener": "listener", "third": {"pool": "past"}},
        match={"rotate": True, "schedule": "drop"},
        algorithm={"group_size": 6, "groups_per_batch": 4},
        pools={"past": {"policy": "speaker", "every": 15}},
        validation={"every": 5, "against": [{"policy": "listener"}]},
    )
    assert found.keys() == {
        "policies.speaker.train.lrr",
        "policies.speaker.reference",
        "policies.listener",
        "policies.Third",
        "seats",
    }
    assert "did you mean policies.speaker.train.lr?" in found["policies.speaker.train.lrr"]
    assert "policy 'idle' no seat" in found["seats"]


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"policies": {"Speaker": {}}}, "policies.Speaker", "must begin with a small letter"),
        ({"policies": {"speaker": 3, "listener": {}}}, "policies.speaker", "must be a table"),
        ({"seats": {"speaker": {"policy": "speaker", "bot": "x"}}}, "seats.speaker.bot", "exactly one|one player"),
        ({"seats": {"speaker": {}}}, "seats.speaker.policy", "one player"),
        (
            {"policies": {"speaker": {"train": {"deterministic": True}}, "listener": {}}},
            "policies.speaker.train.deterministic",
            "must be the job's, false",
        ),
        (
            {
                "train": {"steps": 1, "deterministic": True},
                "policies": {"speaker": {"algorithm": {"kl_coef": 0.1}}, "listener": {}},
            },
            "policies.speaker.algorithm.kl_coef",
            "reference-forward computes what comes together",
        ),
        ({"rollout": {"sleep": "always"}}, "rollout.sleep", "several policies"),
        (
            {"reward_models": [{"base": "judge", "policies": ["listener", "speeker"]}]},
            "reward_models.0.policies",
            "is not a policy of this job; its policies are: speaker, listener",
        ),
        (
            {"reward_models": [{"base": "judge", "policies": ["speaker"]}], "policies": {}, "seats": {}},
            "reward_models.0.policies",
            "it has no .policies.",
        ),
        (
            {"match": {"rotate": True}, "algorithm": {"group_size": 3}},
            "algorithm.group_size",
            "multiple of the 2 seats",
        ),
        ({"match": {"rotate": True}, "rollout": {"engine": "toy", "oversample": 2}}, "rollout.oversample", "must be 0"),
        ({"match": {"rotate": True}, "seats": {"*": "speaker"}}, "match.rotate", "each by its own name"),
        (
            {"match": {"max_opponent_lag": 3}, "policies": {}, "seats": {"speaker": {"bot": "x"}}},
            "match.max_opponent_lag",
            "needs two",
        ),
        (
            {
                "match": {"max_opponent_lag": 2},
                "policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 1}, "train": {"steps": 40}}},
            },
            "match.max_opponent_lag",
            "must be 3 or more: policy 'listener' makes 4 steps",
        ),
        ({"policies": {}, "kind": "rl"}, "seats.speaker", "has no"),
        (
            {"start": {"from": "j-0123456789@5"}},
            "start",
            r'does not apply .* \[policies.speaker.start\] from = "JOB~speaker@latest"',
        ),
        (
            {"policies": {"speaker": {"start": {"from": "j-0123456789@live"}}, "listener": {}}},
            "policies.speaker.start.from",
            "take @latest",
        ),
        (
            {"policies": {"speaker": {"start": {"from": "nowhere?"}}, "listener": {}}},
            "policies.speaker.start.from",
            "JOB@STEP",
        ),
        (
            {
                "train": {"steps": 10, "learner": "simulated"},
                "policies": {"speaker": {"start": {"from": "j-0123456789@5", "optimizer": True}}, "listener": {}},
            },
            "policies.speaker.start.optimizer",
            "does not apply to train.learner",
        ),
        ({"seats": {"speaker": "speaker", "listener": {"frozen": "yesterday's"}}}, "seats.listener.frozen", "JOB@STEP"),
        (
            {"seats": {"speaker": "speaker", "listener": {"frozen": "j-0123456789@live"}}},
            "seats.listener.frozen",
            "JOB",
        ),
        ({"seats": {"speaker": {"policy": "speaker", "model": {"base": "m"}}}}, "seats.speaker.model", "a checkpoint"),
        (
            {"match": {"rotate": True}, "policies": {}, "seats": {"speaker": {"bot": "x"}, "listener": {"bot": "x"}}},
            "match.rotate",
            "needs .policies.",
        ),
        (
            {"validation": {"every": 5, "against": [{"policy": "x"}]}},
            "validation.against.0.policy",
            "not a policy of this",
        ),
        ({"validation": {"every": 5, "against": [{}]}}, "validation.against.0.policy", "one player"),
        ({"validation": {"every": 5, "against": [{"bot": "r"}] * 2}}, "validation.against", "twice"),
        ({"validation": {"every": 5, "against": [{"bot": "low"}]}}, "validation.against", "bounds of val/winrate"),
        (
            {"validation": {"every": 5, "episodes": 150_000, "against": [{"bot": "r"}, {"bot": "s"}]}},
            "validation.episodes",
            "2 opponents",
        ),
        (
            {
                "validation": {"every": 5, "against": [{"bot": "r"}]},
                "policies": {"speaker": {}},
                "seats": {"*": "speaker"},
            },
            "validation.against",
            "without patterns",
        ),
        (
            {"validation": {"every": 5, "against": [{"bot": "r"}]}, "policies": {}, "seats": {}},
            "validation.against",
            "needs .seats.",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**changes)
    assert field in found and re.search(problem, found[field]), found


def test_policies_are_judged_as_the_job_is() -> None:
    """What contradicts itself between tables is refused in a policy too, and defaults follow from its own settings."""
    train = {"learner": "simulated", "steps": 10}
    found = refused(train=train, policies={"speaker": {"train": {"lr": 0.5}}, "listener": {}})
    assert found == {"policies.speaker.train.lr": "does not apply to train.learner = 'simulated'"}
    target = {"target": {"val/exact": 0.9}, "parallel": "zero3"}
    found = refused(policies={"speaker": {"train": target}, "listener": {}})
    assert found.keys() == {"policies.speaker.train.target.val/exact", "policies.speaker.train.parallel"}
    algorithm = {"overlong_shaping": True, "group_size": 4}
    spec = parse_spec({**BASE, "rollout": {"engine": "toy", "max_tokens": 40}, "algorithm": algorithm})
    shaped = [policy.algorithm for policy in spec.policies.values()]
    assert [(own.overlong_length, own.overlong_buffer) for own in shaped] == [(40, 8), (40, 8)]
    assert parse_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("advantage", GROUP_BASELINES)
def test_a_group_of_one_has_no_baseline_for_any_policy(advantage: str) -> None:
    alone = {"name": "spiral", "group_size": 1}
    policies: dict[str, Any] = {"speaker": {}, "listener": {"algorithm": {"name": "ppo"}}}
    spec = parse_spec({**BASE, "algorithm": alone, "policies": policies})
    assert [policy.algorithm.advantage for policy in spec.policies.values()] == ["rae", "gae"]
    compares = {"algorithm": {"name": "rloo", "advantage": advantage}}
    found = refused(algorithm=alone, policies={**policies, "listener": compares})
    assert found.keys() == {"policies.listener.algorithm.group_size"}
    assert "it needs 2 or more" in found["policies.listener.algorithm.group_size"]
    found = refused(algorithm=alone, policies=dict.fromkeys(policies, compares))
    assert found.keys() == {f"policies.{name}.algorithm.group_size" for name in policies}, "each, at once"
    found = refused(policies={**policies, "speaker": {"algorithm": {"advantage": advantage, "group_size": 1}}})
    assert "policies.speaker.algorithm.group_size" in found
    own = {"group_size": 1, "advantage": advantage}
    found = refused(algorithm=own, policies={}, seats={})
    assert found.keys() == {"algorithm.group_size"} and "2 or more" in found["algorithm.group_size"]


def ranks(**changes: Any) -> dict[str, int]:
    spec = parse_spec({**BASE, **changes})
    return {name: spec_of(spec, name).resources.ranks for name in spec.policies}


def test_each_policy_has_ranks_of_its_own_or_those_of_the_job() -> None:
    assert ranks() == {"speaker": 1, "listener": 1}
    assert ranks(resources={"trainer_ranks": 2}) == {"speaker": 2, "listener": 2}
    own = {"speaker": {"trainer_ranks": 3}, "listener": {"train": {"parallel": "zero1"}}}
    assert ranks(resources={"trainer_ranks": 2}, policies=own) == {"speaker": 3, "listener": 2}
    for resources in ({"trainer_ranks": 2}, {"trainer_gpus": 2}):
        alone = {"policies": {"speaker": {}}, "seats": {"*": "speaker"}, "resources": resources}
        assert ranks(**alone) == {"speaker": 2}
    spec = parse_spec({**BASE, "resources": {"trainer_ranks": 2}, "policies": own})
    for name in own:  # as the ranks read it
        assert parse_spec(spec_of(spec, name).model_dump(mode="json")) == spec_of(spec, name)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        (
            {"resources": {"trainer_gpus": 2}},
            "resources.trainer_gpus",
            "write trainer_gpus = 1; or trainer_gpus = 0",
        ),
        (
            {"resources": {"trainer_gpus": 1}, "policies": {"speaker": {"trainer_ranks": 2}, "listener": {}}},
            "policies.speaker.trainer_ranks",
            "must be left out",
        ),
        (
            {"policies": {"speaker": {"train": {"parallel": "zero2"}}, "listener": {"trainer_ranks": 2}}},
            "policies.speaker.train.parallel",
            "needs trainer_ranks > 1",
        ),
        (
            {"resources": {"trainer_ranks": 2}, "train": {"steps": 30, "parallel": "zero1"}},
            "policies.listener.train.parallel",
            "one group of ranks per process",
        ),
        ({"resources": {"trainer_ranks": 33}}, "resources.trainer_ranks", "66 ranks to 2 policies"),
        (
            {
                "train": {"steps": 30, "learner": "simulated"},
                "policies": {"speaker": {"trainer_ranks": 2}, "listener": {}},
            },
            "policies.speaker.trainer_ranks",
            "simulated",
        ),
    ],
)
def test_ranks_that_policies_cannot_have_are_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**changes)
    assert found.keys() == {field} and problem in found[field]


def test_policies_do_not_inherit_what_is_wrong_in_the_job() -> None:
    odd = {f"odd{i}": 1 for i in range(50)}
    model = {"base": "m", "lora": {"rank": 8, **odd}}
    data = {**BASE, "model": model, "train": {"steps": 10, "lr": -1.0, **odd}, "algorithm": {"group_size": 4, **odd}}
    inherited = with_job_settings(data)["policies"]["speaker"]
    assert inherited == {"model": {"base": "m"}, "train": {"steps": 10}, "algorithm": {"group_size": 4}}, (
        "a body of a megabyte would become as many megabytes as there are policies"
    )
    found = refused(train={"steps": 10, "lr": -1.0})
    assert found.keys() == {"train.lr"}


def test_too_many_policies_are_refused_before_they_are_completed() -> None:
    data = {**BASE, "policies": {f"p{i}": {} for i in range(MAX_POLICIES + 1)}, "train": {"steps": 0}}
    assert "policies" not in with_job_settings(data)
    found = refused(policies=data["policies"], train=data["train"])
    assert found.keys() == {"policies", "train.steps"} and f"{MAX_POLICIES} policies at most" in found["policies"]
