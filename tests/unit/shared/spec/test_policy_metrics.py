"""Metrics that a job with several policies names: the ones that nothing would ever report are refused, with the right
name."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import parse_spec, read_stored
from opentinker.shared.spec.sweeps.children import parse_sweep
from opentinker.shared.types.metric_names import meant_metric, split_policy
from tests.support.factories import refusals
from tests.unit.shared.spec.signalling_job import BASE, refused

EVALUATED = {"every": 5, "episodes": 4, "against": [{"bot": "random"}, {"policy": "listener"}]}
HOOK = {"url": "https://hooks.example/x", "on": ["target"]}


def test_targets_name_metrics_as_the_policy_reports_them() -> None:
    target = {"val/winrate/speaker/random": 0.9, "val/rating/speaker": 100, "listener/reward/mean": 0.5}
    found = refused(train={"steps": 10, "target": target}, validation=EVALUATED)
    assert found.keys() == {f"train.target.{name}" for name in target}
    told = found["train.target.val/winrate/speaker/random"]
    assert told.endswith('[policies.speaker.train] target = { "val/winrate/random" = 0.9 }')
    assert '[policies.listener.train] target = { "reward/mean" = 0.5 }' in found["train.target.listener/reward/mean"]
    own = {"speaker": {"train": {"target": {"speaker/val/rating": 9}}}, "listener": {}}
    (field,) = refused(policies=own, validation=EVALUATED)
    assert field == "policies.speaker.train.target.speaker/val/rating"
    right = {"val/winrate/random": 0.9, "val/winrate/listener": 0.5, "val/winrate/listener/low": 0.4, "val/rating": 1}
    assert parse_spec({**BASE, "train": {"steps": 10, "target": right}, "validation": EVALUATED}).train.target == right


def test_a_model_behind_a_url_may_be_named_as_a_policy_begins() -> None:
    named = {"url": "https://models.example/v1", "model": "speaker/large"}
    target = {"val/winrate/speaker/large": 0.5}
    spec = {**BASE, "train": {"steps": 10, "target": target}, "validation": {**EVALUATED, "against": [named]}}
    assert parse_spec(spec).train.target == target


def test_the_best_checkpoints_of_a_policy_are_chosen_by_its_own_metric() -> None:
    kept = {"keep_best": 1, "best_metric": "val/winrate/speaker/random"}
    found = refused(artifacts=kept, validation=EVALUATED)
    assert "without it, 'val/winrate/random'" in found["artifacts.best_metric"]


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("val/winrate/speaker/random", "is called 'speaker/val/winrate/random'"),
        ("val/rating/listener/error", "is called 'listener/val/rating/error'"),
        ("reward/mean", "name one of speaker/reward/mean, listener/reward/mean"),
        ("val/winrate/random", "name one of speaker/val/winrate/random, listener/val/winrate/random"),
    ],
)
def test_messages_and_sweeps_name_the_policy_first(metric: str, problem: str) -> None:
    told = {**HOOK, "target": {"metric": metric, "above": 0.5}}
    assert problem in refused(notify=[told], validation=EVALUATED)["notify.0.target.metric"]
    swept: dict[str, Any] = {**BASE, "validation": EVALUATED, "sweep": {"parameters": {"train.lr": [1e-4, 1e-3]}}}
    swept["sweep"]["metric"] = metric
    assert problem in refusals(parse_sweep, swept)["sweep.metric"]


def test_a_sweep_of_several_policies_has_no_metric_by_default() -> None:
    swept: dict[str, Any] = {**BASE, "sweep": {"parameters": {"train.lr": [1e-4, 1e-3]}}}
    assert (
        "is needed in a job with [policies], e.g. one of speaker/reward/mean"
        in refusals(parse_sweep, swept)["sweep.metric"]
    )
    swept["sweep"]["metric"] = "speaker/reward/mean"
    assert parse_sweep(swept).table.metric == "speaker/reward/mean"
    swept["sweep"]["metric"] = "rollout/tokens_per_s"
    assert parse_sweep(swept).table.metric == "rollout/tokens_per_s", "a metric of workers"
    swept["sweep"]["metric"] = "listener/step_seconds"
    assert parse_sweep(swept).table.goal == "minimize", "as without the policy's name"


def test_metrics_without_a_policy_are_left_alone() -> None:
    for name in (
        "val/rating",
        "val/winrate",
        "val/winrate/random",
        "val/winrate/a",
        "val/winrate/a/high",
        "exact",
        "a",
    ):
        assert split_policy(name, ["a"]) is None
    assert split_policy("a/exact", ["a"]) == ("a", "exact")
    assert meant_metric("val/rating/a", ["a/val/rating", "b/val/rating"]) == "a/val/rating"
    assert meant_metric("val/winrate/a/b/low", ["a/val/winrate/b/low"]) == "a/val/winrate/b/low"
    assert meant_metric("val/exakt", ["val/exact"]) == "val/exact" and meant_metric("x", []) is None


def test_a_job_that_was_accepted_is_read_whatever_names_it_has() -> None:
    wrong = {"train": {"steps": 10, "target": {"listener/reward/mean": 0.5}}}
    own = {"speaker": {"train": {"target": {"speaker/val/rating": 9}}}, "listener": {}}
    told = {**HOOK, "target": {"metric": "reward/mean", "above": 0.5}}
    kept = {"keep_best": 1, "best_metric": "val/winrate/speaker/random"}
    changes = {**wrong, "policies": own, "notify": [told], "artifacts": kept, "validation": EVALUATED}
    assert len(refused(**changes)) == 4
    plain = read_stored({**BASE, **changes}).model_dump(mode="json")
    assert plain["artifacts"]["best_metric"] == kept["best_metric"]
    assert read_stored(plain).model_dump(mode="json") == plain
    unknown = {**BASE, **changes, "seats": {"speaker": "speaker", "listener": "x"}}
    assert refusals(read_stored, unknown).keys() == {"seats", "seats.listener"}, "what cannot be run is refused"
