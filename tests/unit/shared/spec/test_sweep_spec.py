"""[sweep]: which jobs it makes, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from opentinker.services.scheduler.http.openapi import job_schema
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.sweeps.children import child_of, named, parse_sweep
from opentinker.shared.types.errors import SpecError
from tests.support.factories import SMALLEST, refusals


def sweep(parameters: Any, spec: dict[str, Any] | None = None, **table: Any) -> dict[str, Any]:
    return {**SMALLEST, **(spec or {}), "sweep": {"parameters": parameters, **table}}


def settings(parameters: Any, **table: Any) -> list[dict[str, Any]]:
    return parse_sweep(sweep(parameters, **table)).trials


def wrong(data: dict[str, Any]) -> dict[str, str]:
    return refusals(parse_sweep, data)


def test_a_grid_has_every_combination_the_last_parameter_first() -> None:
    tables = {"train": {"lr": [1e-4, 1e-3]}, "algorithm.group_size": [2, 4]}
    assert settings(tables) == [
        {"train.lr": lr, "algorithm.group_size": size} for lr in (1e-4, 1e-3) for size in (2, 4)
    ]


@pytest.mark.parametrize(
    ("path", "parameter", "values"),
    [
        ("train.lr", {"low": 1e-6, "high": 1e-3, "log": True, "points": 4}, [1e-6, 1e-5, 1e-4, 1e-3]),
        ("train.lr", {"low": 0, "high": 1, "points": 3}, [0, 0.5, 1]),
        ("train.weight_decay", {"low": 0, "high": 0.3, "step": 0.1}, [0, 0.1, 0.2, 0.3]),
        ("algorithm.group_size", {"low": 2, "high": 5}, [2, 3, 4, 5]),
        ("algorithm.group_size", {"low": 4, "high": 17, "step": 4}, [4, 8, 12, 16]),
        ("algorithm.group_size", {"low": 2, "high": 32, "log": True, "points": 5}, [2, 4, 8, 16, 32]),
        ("environment.config.digits", {"low": 1, "high": 3}, [1, 2, 3]),
        ("environment", {"values": [{"name": "bandit"}, {"name": "gsm8k"}]}, [{"name": "bandit"}, {"name": "gsm8k"}]),
    ],
)
def test_ranges_of_a_grid(path: str, parameter: dict[str, Any], values: list[Any]) -> None:
    assert [one[path] for one in settings({path: parameter})] == values


def test_a_grid_with_a_budget_of_jobs_ends_after_its_first_combinations() -> None:
    values = {f"environment.config.{n}": [*range(11)] for n in "abc"}
    assert [one["environment.config.c"] for one in settings(values, max_jobs=7, seeds=[1, 2])] == [0, 1, 2]
    assert len(settings(values, method="random", max_jobs=30)) == 30
    assert len(settings({"train.lr": [1e-4, 1e-3]}, max_jobs=30)) == 2
    assert parse_sweep(sweep(values, method="tpe", max_jobs=30, seeds=[1, 2])).table.most_trials == 15


def test_random_draws_lie_in_their_ranges_and_are_repeatable() -> None:
    tables = {
        "train.lr": {"low": 1e-6, "high": 1e-2, "log": True},
        "algorithm.group_size": {"low": 2, "high": 9},
        "train.weight_decay": {"low": 0, "high": 1},
    }
    found = settings(tables, method="random", trials=200, seed=5)
    assert found == settings(tables, method="random", trials=200, seed=5)
    assert found != settings(tables, method="random", trials=200, seed=6)
    assert all(1e-6 <= one["train.lr"] <= 1e-2 for one in found)
    assert 0.35 < sum(one["train.lr"] < 1e-4 for one in found) / 200 < 0.65, "orders of magnitude are equally likely"
    assert {one["algorithm.group_size"] for one in found} == set(range(2, 10))
    assert any(0 < one["train.weight_decay"] < 1 for one in found), "a fraction, though its ends are whole"


def test_random_draws_do_not_repeat() -> None:
    found = settings({"algorithm.group_size": {"low": 2, "high": 5}}, method="random", trials=50)
    assert sorted(one["algorithm.group_size"] for one in found) == [2, 3, 4, 5]


def test_a_search_with_fewer_combinations_than_trials_says_so() -> None:
    few = sweep({"algorithm.group_size": [4]}, method="random", trials=2)
    assert parse_sweep(few).size == "up to 1 job (trials = 2, but its parameters have 1 combination)"
    enough = sweep({"algorithm.group_size": [4, 8]}, method="random", trials=9, max_jobs=2)
    assert parse_sweep(enough).size == "up to 2 jobs"


def test_a_job_has_its_values_its_seed_and_the_sweep_s_id() -> None:
    parsed = parse_sweep(sweep({"train": {"lr": [0.25]}}, {"tags": ["mine"]}, seeds=[7]))
    spec = child_of(parsed.table, parsed.base, parsed.trials[0], 7)
    spec = named(spec, "s-0123456789", 3, parsed.trials[0])
    assert (spec["train"], spec["rollout"]) == ({"steps": 1, "lr": 0.25, "seed": 7}, {"seed": 7})
    assert (spec["name"], spec["tags"]) == ("j #3 lr=0.25", ["mine", "s-0123456789"])
    assert "tags" not in SMALLEST and parsed.base["train"] == {"steps": 1}, "the base stays as it was written"


def test_jobs_that_differ_by_their_seed_have_different_names() -> None:
    def name(seed: int, of: str = "j") -> str:
        return str(named({**SMALLEST, "name": of}, "s-0123456789", 3, {"train.lr": 0.25}, seed)["name"])

    assert name(2) == "j #3 lr=0.25 seed=2"
    long = "x" * 200
    assert name(1, long) != name(2, long) and len(name(2, long)) <= 200


@pytest.mark.parametrize(
    ("data", "field", "problem"),
    [
        (sweep({"train": {"lrr": [1]}}), "sweep.parameters.train.lrr", "did you mean train.lr?"),
        (sweep({"train.lr": [1e-4, -1]}), "sweep.parameters.train.lr", "greater than or equal to 0"),
        (sweep({"train.lr": [1e-4, 1e-4]}), "sweep.parameters.train.lr.values", "is there twice"),
        (sweep({"train.lr": 0.1}), "sweep.parameters.train.lr", "must be a list of values or a range"),
        (sweep({"train.lr": {"low": 2, "high": 1}}), "sweep.parameters.train.lr.high", "ends before it begins"),
        (sweep({"train.lr": {"low": 0, "high": 1, "log": True}}), "sweep.parameters.train.lr.low", "above 0"),
        (sweep({"train.lr": {"low": 0}}), "sweep.parameters.train.lr.high", "is needed"),
        (sweep({"train.lr": {"low": 0, "high": 1}}), "sweep.parameters.train.lr", "points or step"),
        (sweep({"train.lr": {"low": -1e300, "high": 1}}), "sweep.parameters.train.lr.low", "within"),
        (sweep({"train.lr": {"low": 0, "high": 1, "step": 2}}), "sweep.parameters.train.lr.step", "larger than"),
        (sweep({"train.warmup_steps": [0, 9]}), "sweep.parameters.train.warmup_steps", "is larger than steps=1"),
        (sweep({"name.x": [1]}), "sweep.parameters.name.x", "cannot be varied"),
        (sweep({"model.base.x": [1]}), "sweep.parameters.model.base.x", "base is not a table"),
        (sweep({"train": [{"steps": 1}], "train.lr": [1]}), "sweep.parameters.train.lr", "part of train"),
        (sweep({"train.lr": [1], "train": {"lr": [2]}}), "sweep.parameters.train.lr", "is written twice"),
        (sweep({"train.seed": [1]}, seeds=[1]), "sweep.parameters.train.seed", "set by sweep.seeds"),
        (sweep({"train.lr": [1]}, seeds=[1, 1]), "sweep.seeds", "twice"),
        (sweep({"train.lr": [1]}, trials=3), "sweep.trials", "does not apply to a grid"),
        (sweep({"train.lr": [1]}, max_jobs=1, seeds=[1, 2]), "sweep.max_jobs", "less than the 2 jobs of one trial"),
        (sweep({"train.lr": [1]}, max_jobs=1001), "sweep.max_jobs", "less than or equal to 1000"),
        ({**SMALLEST, "kind": "sweep"}, "sweep", "is needed"),
        (sweep({"train.lr": [1]}, {"kind": "rl"}, kind="sft"), "sweep.kind", "contradicts kind = 'rl'"),
        (sweep({"train.lr": [1]}, {"kind": "sweep"}, kind="inference"), "sweep.kind", "must be"),
        (sweep({"train.lr": [1, 2]}, method="tpe"), "sweep.trials", "is needed"),
        (sweep({"train.lr": [1]}, method="random", trials=600, seeds=[1, 2]), "sweep.trials", "more than the 1,000"),
        (sweep({f"environment.config.{n}": [*range(11)] for n in "abc"}), "sweep.parameters", "make 1,331 jobs"),
        (sweep({"train.lr": [*range(101)]}), "sweep.parameters.train.lr.values", "at most 100 items"),
        (
            sweep({f"environment.config.k{n}": [1] for n in range(17)}),
            "sweep.parameters",
            "has 17 settings; at most 16",
        ),
        (sweep({f"{n}": 0 for n in range(7000)}), "sweep.parameters", "has 7,000 settings; at most 16"),
        (sweep({}), "sweep.parameters", "at least 1 item"),
        (sweep({"train.lr": [1]}, unknown=1), "sweep.unknown", "unknown setting"),
        (sweep({"train.lr": [1]}, seed=3), "sweep.seed", "does not go with method = 'grid'"),
        (
            sweep({"train.lr": [1]}, early_stopping={"rule": "halving", "min_steps": 1, "min_trials": 2}),
            "sweep.early_stopping.min_trials",
            "does not go with rule = 'halving'",
        ),
        (
            sweep({"train.lr": [1]}, early_stopping={"min_steps": 1, "factor": 2}),
            "sweep.early_stopping.factor",
            "does not go with rule = 'median'",
        ),
        (sweep({"train.lr": [1]}, early_stopping={}), "sweep.early_stopping.min_steps", "is needed"),
        (sweep({"train.lr": [1]}, {"tags": [f"t{n}" for n in range(20)]}), "tags", "at most 20"),
        (sweep({"train.lr": [1]}, {"kind": "inference"}), "kind", "has no end"),
        (sweep({"train.lr": [1]}, {"kind": ["rl"]}), "kind", "must be"),
        (sweep({"train.lr": [1]}, {"trian": {}}), "trian", "did you mean"),
        ({**SMALLEST, "sweep": 3}, "sweep", "must be a table"),
        (sweep({"train.lr": [10**30]}), "(whole spec)", "cannot be stored"),
        (sweep({"train.lr": [1]}, {"notes": "x" * 70_000}), "(whole spec)", "may have 65,536"),
        (SMALLEST, "sweep", "is needed"),
    ],
)
def test_mistakes_name_their_field(data: dict[str, Any], field: str, problem: str) -> None:
    found = wrong(data)
    assert set(found) == {field} and problem in found[field]


@pytest.mark.parametrize("rule", ["median", "halving"])
def test_the_table_of_a_sweep_is_accepted_again_with_all_defaults(rule: str) -> None:
    table = parse_sweep(sweep({"train.lr": [1]}, early_stopping={"rule": rule, "min_steps": 1})).table
    again = {**SMALLEST, "sweep": table.model_dump(mode="json")}
    assert parse_sweep(again).table == table


def test_mistakes_of_the_table_and_of_the_first_job_are_reported_at_once() -> None:
    parameters = {
        "train.learning_rate": [1e-4],
        "train.lr": {"low": 3, "high": 1},
        "train.weight_decay": {"low": 0, "high": 1, "log": True},
        "name": ["a"],
    }
    found = wrong(sweep(parameters, {"trian": {}}, method="random"))
    of = {field.removeprefix("sweep.parameters.") for field in found}
    assert of == {"train.learning_rate", "train.lr.high", "train.weight_decay.low", "name", "trian", "sweep.trials"}
    assert wrong(sweep({"name": ["a"], "train.lr": [-1]})).keys() == {
        "sweep.parameters.name",
        "sweep.parameters.train.lr",
    }


def test_settings_that_a_wrong_range_would_give_are_not_called_missing() -> None:
    parameters = {"train.steps": {"low": 9, "high": 3}}
    data = {name: value for name, value in sweep(parameters).items() if name != "train"}
    assert wrong({**data, "train": {"warmup_steps": 5}}).keys() == {"sweep.parameters.train.steps.high"}


def test_a_mistake_that_a_varied_value_causes_in_another_setting_names_the_combination() -> None:
    data = sweep({"train.steps": [3, 9]}, {"train": {"warmup_steps": 5}, "trian": {}})
    found = wrong(data)
    assert found["train.warmup_steps"] == "with train.steps = 3: is larger than steps=3"
    assert found["trian"].startswith("unknown setting"), "which the sweep does not cause"


def test_one_job_of_a_sweep_is_refused_with_the_way_to_submit_it() -> None:
    data = {name: value for name, value in sweep({"train.steps": [3]}).items() if name != "train"}
    with pytest.raises(SpecError) as refused:
        parse_spec(data)
    told = str(refused.value)
    assert told.startswith("sweep: this is a sweep, not a job") and "opentinker submit FILE" in told
    with pytest.raises(SpecError, match=r"^sweep: this is a sweep, not a job"):
        parse_spec({**SMALLEST, "kind": "sweep"})


def test_a_sweep_that_is_null_is_none_as_the_schema_says() -> None:
    plain = {**SMALLEST, "sweep": None}
    jsonschema.validate(plain, job_schema())
    assert parse_spec(plain) == parse_spec(SMALLEST)
    assert wrong({**plain, "kind": "sweep"}).keys() == {"sweep"}


def test_the_kind_of_the_jobs_stands_in_the_table_where_kind_is_sweep() -> None:
    swept = sweep({"train.lr": [1]}, {"kind": "sweep"})
    assert parse_sweep(swept).base["kind"] == "rl" == parse_sweep(swept).table.kind
    supervised = {name: value for name, value in SMALLEST.items() if name != "environment"}
    rows = {**supervised, "kind": "sweep", "data": {"path": "rows.jsonl"}}
    found = parse_sweep({**rows, "sweep": {**swept["sweep"], "kind": "sft"}})
    assert found.base["kind"] == "sft" and (found.table.metric, found.table.goal) == ("loss", "minimize")


@pytest.mark.parametrize(
    ("metric", "goal"),
    [("step_seconds", "minimize"), ("mismatch/mean", "minimize"), ("val/failed", "minimize"), ("exact", "maximize")],
)
def test_the_goal_of_a_known_metric_follows_from_its_name(metric: str, goal: str) -> None:
    assert parse_sweep(sweep({"train.lr": [1]}, metric=metric)).table.goal == goal


@pytest.mark.parametrize("metric", ["loss/policy", "entropy", "my_score"])
def test_a_metric_that_nobody_knows_needs_a_goal(metric: str) -> None:
    assert f"values of {metric} are better is not known" in wrong(sweep({"train.lr": [1]}, metric=metric))["sweep.goal"]
    assert parse_sweep(sweep({"train.lr": [1]}, metric=metric, goal="minimize")).table.goal == "minimize"
    told = {"url": "https://hooks.example/x", "on": ["target"], "target": {"metric": metric, "above": 0.5}}
    data = sweep({"train.lr": [1]}, {"notify": [told]}, metric=metric)
    assert wrong(data).keys() == {"sweep.goal"}, "which bound suits is not known either"


def test_a_wrong_kind_of_the_jobs_is_the_only_mistake_since_their_settings_depend_on_it() -> None:
    rows = {**SMALLEST, "kind": "sweep", "data": {"path": "rows.jsonl"}}
    assert wrong({**rows, "sweep": {"parameters": {"data.batch_size": [1]}, "kind": "stf"}}).keys() == {"sweep.kind"}


def test_values_that_do_not_go_together_are_told_with_their_combination() -> None:
    data = sweep({"train.steps": [5, 2], "train.warmup_steps": [0, 4]})
    assert "with train.steps = 2, train.warmup_steps = 4" in wrong(data)["sweep.parameters.train.warmup_steps"]


def test_the_schema_for_editors_knows_sweeps() -> None:
    jsonschema.validate(sweep({"train.lr": [1]}, {"kind": "sweep"}, kind="sft"), job_schema())
    for wrong_kind in (sweep({"train.lr": [1]}, {"kind": "sweeps"}), sweep({"train.lr": [1]}, kind="sweep")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong_kind, job_schema())
    jsonschema.validate(sweep({"train": {"lr": [1]}, "algorithm.group_size": {"low": 1, "high": 2}}), job_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sweep({"train": {"lr": [1]}}, methd="grid"), job_schema())
