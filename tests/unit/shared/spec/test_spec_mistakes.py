"""Mistakes in a job spec, told to people: which setting was meant, what is missing and how it looks, and the line."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opentinker.sdk.spec_location import command_for, with_places
from opentinker.shared.spec import MAX_MISTAKES, JobSpec, parse_spec
from opentinker.shared.spec.labels import file_name
from opentinker.shared.spec.near import EXAMPLES, SYNONYMS, paths_of
from opentinker.shared.types import mistakes
from opentinker.shared.types.errors import SpecError, described
from opentinker.shared.types.spec_text import parse_text
from tests.support.factories import SMALLEST
from tests.unit.shared.spec.test_spec import changed

EXAMPLES_DIR = Path(__file__).parents[4] / "examples"
GAMES = ("debate", "debate_judge", "gomoku_self", "gomoku_two", "kuhn_poker", "signalling", "tictactoe_two")
"""Examples with several seats, and those that they need."""
ROWS: dict[str, Any] = {"name": "x", "kind": "sft", "model": {"base": "m"}, "train": {"steps": 1}}


def mistakes_in(data: Any) -> list[dict[str, Any]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    return list(caught.value.mistakes)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.learning_rate", "train.lr"),
        ("algorithm.learning_rate", "train.lr"),
        ("algorithm.group_sise", "algorithm.group_size"),
        ("algorithm.num_generations", "algorithm.group_size"),
        ("algorithm.batch_size", "algorithm.groups_per_batch"),
        ("rollout.max_new_tokens", "rollout.max_tokens"),
        ("train.maxTokens", "rollout.max_tokens"),
        ("model.torch_dtype", "model.dtype"),
        ("model.lora.r", "model.lora.rank"),
        ("modle", "model"),
        ("resources.rollout-workers", "resources.rollout_workers"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(wrong: str, meant: str) -> None:
    (mistake,) = mistakes_in(changed(wrong, 1))
    assert mistake["field"] == wrong and mistake["suggestion"] == meant
    assert described(mistake) == f"{wrong}: unknown setting; did you mean {meant}?"


def test_what_was_meant_stands_in_the_same_policy_or_entry_of_a_list() -> None:
    judge = {"base": "m", "wieght": 1}
    policy = {"train": {"lrr": 1, "learning_rate": 1}, "model": {"lora": {"rnk": 1}}}
    spec = {**changed("name", "x"), "reward_models": [judge], "policies": {"a": policy}, "seats": {"s": "a"}}
    assert {one["field"]: one.get("suggestion") for one in mistakes_in(spec)} == {
        "reward_models.0.wieght": "reward_models.0.weight",
        "policies.a.train.lrr": "policies.a.train.lr",
        "policies.a.train.learning_rate": "policies.a.train.lr",
        "policies.a.model.lora.rnk": "policies.a.model.lora.rank",
    }


def test_what_was_meant_is_a_setting_of_this_kind_of_job() -> None:
    (mistake,) = mistakes_in({**ROWS, "data": {"path": "p", "per_device_train_batch_size": 4}})
    assert mistake["suggestion"] == "data.batch_size"


def test_every_synonym_leads_to_a_setting() -> None:
    known = set(paths_of(JobSpec))
    assert [path for path in SYNONYMS if path not in known] == []


def test_a_name_of_a_megabyte_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would hold up the event loop for a minute."""

    def compare(*_: Any) -> list[str]:
        raise AssertionError("compared")

    monkeypatch.setattr("difflib.get_close_matches", compare)
    assert mistakes.nearest("x" * 1_000_000, ["train", "algorithm"]) is None
    with pytest.raises(AssertionError, match="compared"):
        mistakes.nearest("trian", ["train", "algorithm"])


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    (mistake,) = mistakes_in(changed("train.qqzzx", 1))
    assert mistake["problem"] == "unknown setting" and "suggestion" not in mistake


def test_a_choice_is_answered_with_the_near_one() -> None:
    (mistake,) = mistakes_in(changed("model.dtype", "bfloat"))
    assert mistake["suggestion"] == "bfloat16" and "did you mean 'bfloat16'?" in mistake["problem"]


def test_what_is_missing_is_named_with_an_example_and_an_empty_spec_is_told_to_be_one() -> None:
    first, *missing = mistakes_in({})
    assert first["problem"].startswith("is empty")
    least = parse_spec(tomllib.loads("\n".join(mistake["suggestion"] for mistake in missing)))
    assert least.kind == "rl"
    assert all(mistake["value"] is None for mistake in missing), "not the whole document"
    assert [line for line in EXAMPLES.values() if not tomllib.loads(line)] == []
    (mistake,) = mistakes_in({**SMALLEST, "model": "m"})
    assert mistake["problem"] == f"must be a table, e.g. {EXAMPLES['model']}"


def test_a_value_is_shown_as_far_as_a_person_reads_it() -> None:
    (mistake,) = mistakes_in({**SMALLEST, "train": {"steps": 1, "lr": ["x" * 5000]}})
    assert len(mistake["value"]) < 100


def test_a_setting_of_several_types_is_one_mistake() -> None:
    (mistake,) = mistakes_in({**ROWS, "data": {"path": "p", "validation": [1]}})
    assert mistake["field"] == "data.validation" and mistake["problem"] == "must be a valid number or a text"


TOML = """\
# learning_rate is what others call it
name = "x"  # learning_rate
model = { base = "learning_rate", lora = { rank = 4, r = 8 } }
environment.name = "bandit"

[train]
steps = 1
"learning_rate" = 1e-3
[[reward_models]]
base = "a"
[[reward_models]]
weight = 1
"""
JSON = """{
 "name": "x", "model": {"base": "m"}, "environment": {"name": "x"},

 "train": {"steps": 1, "learning_rate": 1}
}"""


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("job.toml", TOML, {"train.learning_rate": (8, 2), "model.lora.r": (3, 54), "reward_models.1.base": (11, 3)}),
        ("job.json", JSON, {"train.learning_rate": (4, 25)}),
    ],
)
def test_mistakes_name_their_lines(tmp_path: Path, name: str, text: str, places: dict[str, tuple[int, int]]) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = with_places(mistakes_in(parse_text(text, path.suffix)), path)
    assert {one["field"]: (one["line"], one["column"]) for one in found} == places
    assert all(described(one).endswith(f"({name}:{one['line']})") for one in found)


@pytest.mark.parametrize(
    "name", ["sweep-lr-0.0001-seed-0", "Qwen3 run 2", "Größe α, 3 Wörter", "数学", "👨‍👩‍👧", "x" * 200]
)
def test_a_name_is_any_text(name: str) -> None:
    assert parse_spec({**SMALLEST, "name": name}).name == name


@pytest.mark.parametrize("name", ["", "  ", "x" * 201, "a\nb", "\x1b[31mred", "ab\u202ecd", "a\u2028b", None, 5])
def test_a_name_that_cannot_be_shown_is_refused(name: Any) -> None:
    (mistake,) = mistakes_in({**SMALLEST, "name": name})
    assert mistake["field"] == "name" and "^" not in mistake["problem"], "no regular expression"


@pytest.mark.parametrize(
    ("name", "safe"),
    [("../../etc/passwd", "etc-passwd"), ("..", "job"), ("Qwen3 run 2", "Qwen3-run-2"), ("数学", "job"), ("/", "job")],
)
def test_a_file_that_is_named_after_a_job_stays_where_it_belongs(name: str, safe: str) -> None:
    assert file_name(name) == safe


@pytest.mark.parametrize("part", [(), ("model",), ("environment", "config", "of", "a", "table")])
def test_tens_of_thousands_of_names_cost_no_seconds_of_the_event_loop(part: tuple[str, ...]) -> None:
    """A body of a megabyte has room for them; every unknown name is compared with all settings."""
    data: dict[str, Any] = {f"k{number}": 0 for number in range(70_000)}
    for name in reversed(part):
        data = {name: data}
    began = time.process_time()
    with pytest.raises(SpecError) as refused:
        parse_spec(data)
    assert time.process_time() - began < 3.0
    found = refused.value.mistakes
    assert len(found) <= MAX_MISTAKES + 1
    assert ("more mistakes, which are not shown" in found[-1]["problem"]) == (len(part) < 2)


@pytest.mark.parametrize("name", GAMES)
def test_an_example_whose_model_is_not_there_names_the_command_that_makes_it(name: str) -> None:
    file = EXAMPLES_DIR / f"{name}.toml"
    base = tomllib.loads(file.read_text())["model"]["base"]
    absent = {
        "field": "model.base",
        "value": base,
        "problem": f"does not exist on the server (/elsewhere/{base}); give",
    }
    (found,) = with_places([absent], file)
    command = found["problem"].partition("Make it with: ")[2]
    assert command.startswith("python ") and command.endswith(f" {base}"), found
    assert command_for(f"/elsewhere/{base}x does not exist", file.read_text()) is None, "another path"
    (other,) = with_places([{**absent, "problem": f"/elsewhere/{base} has no config.json"}], file)
    assert "Make it" not in other["problem"]
