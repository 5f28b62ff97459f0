"""`opentinker init` writes job files, and the schema that they name accepts what the server accepts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.services.scheduler.http.openapi import job_schema
from opentinker.shared.spec import parse_spec

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


def init(path: Path, *options: str, answers: str = "") -> Any:
    return CliRunner().invoke(app, ["init", str(path), *options], input=answers)


@pytest.mark.parametrize(
    ("options", "answers", "expected"),
    [
        (["--yes"], "", {"kind": "rl", "environment.name": "gsm8k", "model.base": "Qwen/Qwen3-0.6B", "lora": True}),
        ([], "\nbandit\nmodels/mine\nn\n", {"kind": "rl", "environment.name": "bandit", "lora": False}),
        ([], "chess\nsft\nmine.jsonl\n\n\n", {"kind": "sft", "data.path": "mine.jsonl", "lora": True}),
        (["--kind=dpo", "--rows=pairs.parquet", "--whole"], 'a "b"\n', {"kind": "dpo", "model.base": 'a "b"'}),
        (["--yes", "--environment=mine.games:Chess"], "", {"environment.name": "mine.games:Chess"}),
    ],
)
def test_four_questions_make_a_job(tmp_path: Path, options: list[str], answers: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "my job.toml"
    done = init(path, *options, answers=answers)
    assert done.exit_code == 0, done.output
    assert path.read_text().startswith("#:schema http://127.0.0.1:8080/v1/schema/job.json\n")
    data = tomllib.loads(path.read_text())
    spec = parse_spec(data)
    jsonschema.validate(data, job_schema())
    found: dict[str, Any] = {
        "kind": spec.kind,
        "environment.name": spec.environment.name,
        "model.base": spec.model.base,
    }
    found |= {"data.path": spec.data.path if spec.data else None, "lora": spec.model.lora is not None}
    assert spec.name == "my job" and {name: found[name] for name in expected} == expected


def test_an_answer_that_is_no_kind_is_asked_again(tmp_path: Path) -> None:
    done = init(tmp_path / "job.toml", answers="chess\nx\nsft\nmine.jsonl\n\n\n")
    assert done.exit_code == 0 and "'x' is not one of rl, sft, dpo\n" in done.output


def test_validation_is_of_tasks_that_are_held_back_and_the_schema_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    assert init(path, "--yes", "--url", "http://me:secret@far.example:8080/").exit_code == 0
    assert path.read_text().startswith("#:schema http://far.example:8080/v1/schema/job.json\n")
    spec = parse_spec(tomllib.loads(path.read_text()))
    assert spec.validation is not None and spec.validation.config == {"split": "test"}


def test_the_job_is_printed_as_json(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    told = orjson.loads(init(path, "--yes", "--json").stdout)
    assert told == {"path": str(path), "job": tomllib.loads(path.read_text())}


def test_nothing_is_written_where_the_answers_make_no_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    refused = init(path, "--yes", "--environment=gsm9k")
    assert refused.exit_code != 0 and not path.exists()
    path.write_text("mine")
    there = init(path, "--yes")
    assert there.exit_code == 2 and "already exists" in there.output and path.read_text() == "mine"
    other = tmp_path / "other.toml"
    for options in (["--kind=sft", "--environment=gsm8k"], ["--kind=rl", "--rows=rows.jsonl"]):
        assert "--rows for sft and dpo" in init(other, "--yes", *options).output and not other.exists()
    for place in (tmp_path / "nowhere" / "job.toml", tmp_path / f"{'é' * 150}.toml"):  # more bytes than a name has
        refused = init(place, "--yes")
        assert refused.exit_code == 2, refused.output
    assert "must end in .toml" in init(tmp_path / "job.json", "--yes").output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_conform_to_the_schema(path: Path) -> None:
    jsonschema.validate(tomllib.loads(path.read_text()), job_schema())


def test_the_schema_refuses_what_the_server_refuses() -> None:
    data = tomllib.loads(EXAMPLES[0].read_text())
    wrongs: list[dict[str, Any]] = [{"trian": {}}, {"train": {"steps": "many"}}, {"train": {"setps": 3}}]
    for wrong in wrongs:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data | wrong, job_schema())
