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


def of(data: dict[str, Any]) -> str:
    return setting_of(parse_spec(data).model_dump(mode="json", by_alias=True))


def test_environment_config_and_sampling_are_the_setting() -> None:
    assert of(EVAL) == "gsm8k split=test; temperature 0.8; 512 tokens; 8 samples"
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
            for change in ({"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 5}, {"samples": 4}, {"solved_at": 0.5})
        ),
        {"seats": {"O": {"bot": "perfect"}}},
    ],
)
def test_another_setting_has_another_text(changes: dict[str, Any]) -> None:
    assert of({**EVAL, **changes}) != of(EVAL)


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
