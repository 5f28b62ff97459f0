"""The setting of an evaluation: what must be equal for results to be compared."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.evaluation.setting_text import MAX_CHARACTERS, setting_of
from opentinker.shared.spec import parse_spec
from tests.support.factories import make_spec

EVAL: dict[str, Any] = {
    "kind": "eval", "name": "e", "model": {"base": "m"}, "environment": {"name": "gsm8k", "config": {"split": "test"}},
    "evaluation": {"episodes": 20, "samples": 8, "temperature": 0.8}, "rollout": {"max_tokens": 512},
}  # fmt: skip
ROWS: dict[str, Any] = {"kind": "sft", "name": "s", "model": {"base": "m"}, "train": {"steps": 2}}
HUB: dict[str, Any] = {"path": "d/x", "subset": "main", "validation": "d/x"}
FILES: dict[str, Any] = {"path": "a.jsonl", "validation": "b.jsonl"}
PYTHON: dict[str, Any] = {"type": "python"}


def of(data: dict[str, Any]) -> str:
    return setting_of(parse_spec(data).model_dump(mode="json", by_alias=True))


def test_environment_config_and_sampling_are_the_setting() -> None:
    assert of(EVAL) == "gsm8k split=test; temperature 0.8; 512 tokens; 8 samples; 20 episodes"
    assert setting_of(make_spec(environment__name="gsm8k").model_dump(mode="json")) == "gsm8k", "no [validation]"


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"name": "gsm8k", "config": {"split": "train"}}},
        {"environment": {"name": "gsm8k"}},
        {"environment": {"name": "math", "config": {"split": "test"}}},
        {"rollout": {"max_tokens": 256}},
        *(
            {"evaluation": EVAL["evaluation"] | change}
            for change in (
                {"temperature": 1.0},
                {"top_p": 0.9},
                {"top_k": 5},
                {"samples": 4},
                {"solved_at": 0.5},
                {"seed": 1},
                {"episodes": 30},
            )
        ),
        *(
            {"rollout": {"max_tokens": 512, **change}}
            for change in (
                {"max_turns": 10},
                {"context_length": 2048},
                {"stop": ["\n"]},
                {"stop": ["\n\n"]},
                {"max_tokens_per_turn": 64},
            )
        ),
        *(
            {"environment": EVAL["environment"] | change}
            for change in ({"tools": [PYTHON]}, {"tools": [PYTHON | {"backend": "sandbox"}]}, {"tool_turns": 4})
        ),
        {"seats": {"O": {"bot": "perfect"}}},
    ],
)
def test_another_setting_has_another_text(changes: dict[str, Any]) -> None:
    assert of({**EVAL, **changes}) != of(EVAL)


def test_tools_are_told_apart_and_stay_short() -> None:
    one, other = (of({**EVAL, "environment": EVAL["environment"] | {"tools": [PYTHON | {"timeout_s": seconds}]}})
                  for seconds in (1.0, 2.0))  # fmt: skip
    assert one != other and len(one) == len(other) == len(of(EVAL)) + len("; tools 12345678")


def test_policies_of_one_job_are_evaluated_in_settings_of_their_own() -> None:
    """Each plays its own seats: speaker@10 and listener@10 have no common row."""
    own = {name: {"model": {"base": "m"}} for name in ("speaker", "listener")}
    seats = {"one": "speaker", "two": "listener"}
    spec = make_spec(policies=own, seats=seats, validation={"every": 5}).model_dump(mode="json")
    speaker, listener = (setting_of(spec, name) for name in own)
    assert speaker != listener and "; policy speaker; seats one=speaker, two=listener; " in speaker


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (HUB, {"subset": "socratic"}),
        (HUB, {"validation_split": "test"}),
        (HUB, {"subset": None, "validation_split": "main"}),
        (HUB | {"validation": 0.25}, {"subset": None, "split": "main"}),
        (FILES, {"validation": "c.jsonl"}),
        (FILES, {"mask": "assistant"}),
        (FILES, {"columns": {"prompt": "question"}}),
        (FILES, {"format": "messages"}),
        (FILES, {"max_length": 100}),
        (FILES, {"longer": "drop"}),
        (FILES, {"longer": "cut"}),
        (FILES | {"longer": "cut"}, {"longer": "drop"}),
        (FILES | {"columns": {"prompt": "question"}}, {"columns": {"prompt": "problem"}}),
    ],
)
def test_other_rows_or_tokens_have_another_text(data: dict[str, Any], changes: dict[str, Any]) -> None:
    assert of({**ROWS, "data": data | changes}) != of({**ROWS, "data": data})


def test_a_subset_is_that_of_the_training_rows_where_validation_has_other_ones() -> None:
    elsewhere = HUB | {"validation": "d/y"}
    assert of({**ROWS, "data": elsewhere}) == of({**ROWS, "data": elsewhere | {"subset": "socratic"}}) == "rows of d/y"


def test_an_evaluation_of_training_has_the_text_of_an_eval_job_in_the_same_setting() -> None:
    validation = {"every": 2, **EVAL["evaluation"], "config": {"split": "test"}}
    trained = {**EVAL, "kind": "rl", "train": {"steps": 4}, "validation": validation}
    trained = {name: value for name, value in trained.items() if name != "evaluation"}
    assert of({**trained, "environment": {"name": "gsm8k", "config": {"split": "train"}}}) == of(EVAL)


def test_rows_are_the_setting_of_sft_jobs() -> None:
    assert of({**ROWS, "data": {"path": "a.jsonl", "validation": "b.jsonl"}}).startswith("rows of ")
    share = of({**ROWS, "data": {"path": "a.jsonl", "validation": 0.25}})
    assert share.startswith("0.25 of the rows of ") and share.endswith("; seed 0")


def test_long_settings_are_cut_and_stay_apart() -> None:
    def long(end: str) -> str:
        return of({**EVAL, "environment": {"name": "gsm8k", "config": {"prompt": "x" * 300 + end}}})

    assert len(long("a")) == MAX_CHARACTERS and long("a") != long("b")
