"""Rows as the policy gets them, rendered in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.data import rendered_rows
from opentinker.shared.data.rendered_rows import CHARACTERS, FileRows, RowsToRender, render, rendered
from opentinker.shared.types.core import Message, Tool
from opentinker.shared.types.env_protocol import EnvRow
from tests.support.toys import toy_model

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = toy_model(tmp_path / "model")
    config = orjson.loads((directory / "tokenizer_config.json").read_bytes())
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps({**config, "chat_template": TEMPLATE}))
    return directory


def asking(base: object, **changes: Any) -> RowsToRender:
    fields: dict[str, Any] = {"base": str(base), "chat_template": "model", "special_tokens": "split"}
    return RowsToRender(**(fields | changes))


def said(number: int, *texts: str, **changes: Any) -> EnvRow:
    return EnvRow(number=number, messages=[Message(role="user", content=text) for text in texts], **changes)


@pytest.mark.parametrize("mode", ["model", "plain"])
def test_prompts_have_the_tokens_that_a_rollout_worker_gives_them(model: Path, mode: str) -> None:
    rows = [said(3, "what is 1 + 2?"), said(4, "say <eos> now", "and go on", place="f, line 4", images=1)]
    tools = [] if mode == "plain" else [TOOL]
    found = render(asking(model, chat_template=mode, rows=rows, tools=tools))
    own = Renderer.load_light(str(model), mode, "hermes")
    assert (found.note, found.problem) == ("", "")
    for row, shown in zip(rows, found.rows, strict=True):
        assert shown.tokens == len(own.rendered(row.messages, tools))
    first, second = found.rows
    assert first.prompt == ("what is 1 + 2?" if mode == "plain" else "[add]<user>what is 1 + 2?<eos><assistant>")
    assert "say <eos> now" in second.prompt and (second.place, second.images) == ("f, line 4", 1)


def test_long_prompts_are_cut_and_wrong_rows_keep_their_reason(model: Path) -> None:
    bad = EnvRow(number=1, problem="line 2: answer is missing")
    long, wrong = rendered(asking(model, rows=[said(0, "x" * (CHARACTERS + 5)), bad])).rows
    assert len(long.prompt) == CHARACTERS and long.left_out == 5 + len("<user><eos><assistant>")
    assert long.tokens is not None and long.tokens > CHARACTERS
    assert (wrong.prompt, wrong.tokens, wrong.problem) == ("", None, bad.problem)


def test_a_template_that_refuses_a_row_is_told_with_it(model: Path) -> None:
    refusing = {"eos_token": "<eos>", "chat_template": "{{ raise_exception('system only') }}"}
    (model / "tokenizer_config.json").write_bytes(orjson.dumps(refusing))
    (row,) = rendered(asking(model, rows=[said(0, "hello")])).rows
    assert "system only" in row.problem and row.prompt == "user: hello" and row.tokens is None


def test_without_a_tokenizer_prompts_are_plain_messages() -> None:
    found = rendered(asking("owner/model-of-a-hub", rows=[said(0, "hello")]))
    assert "owner/model-of-a-hub is not on the server's machine" in found.note
    assert (found.rows[0].prompt, found.rows[0].tokens) == ("user: hello", None)


def test_a_template_without_end_stops_at_the_limit_of_the_process(model: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": "<eos>", "chat_template": endless}))
    assert "within 0.5 s" in render(asking(model, rows=[said(0, "hello")]), within_s=0.5).problem


def written(path: Path, *rows: Any) -> dict[str, Any]:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return {"path": str(path)}


def of_file(model: Path, kind: str, data: dict[str, Any], **changes: Any) -> rendered_rows.RenderedRows:
    fields: dict[str, Any] = {"text": "", "offset": 0, "limit": 10}
    return rendered(asking(model, file=FileRows(kind=kind, data=data, **(fields | changes))))


def test_rows_that_a_job_learns_from_are_shown_with_what_is_learned(model: Path, tmp_path: Path) -> None:
    pairs = [{"q": f"question {n}", "completion": f"answer {n}"} for n in range(12)]
    data = written(tmp_path / "pairs.jsonl", *pairs) | {"columns": {"prompt": "q"}}
    page = of_file(model, "sft", data, offset=2, limit=3)
    assert [row.number for row in page.rows] == [2, 3, 4] and (page.count, page.found) == (12, 12)
    assert page.rows[0].prompt == "<user>question 2<eos><assistant>"
    assert page.rows[0].answers == {"completion": "answer 2"} and page.rows[0].place.endswith("line 3")
    found = of_file(model, "sft", data, text="ANSWER 1", offset=1)
    assert [row.number for row in found.rows] == [10, 11] and (found.found, found.searched) == (3, 12)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (row,) = of_file(model, "sft", written(tmp_path / "chats.jsonl", {"messages": chat})).rows
    assert (row.prompt, row.answers) == ("<user>hi<eos><assistant>", {"messages": "hello"})
    choice = {"prompt": "which?", "chosen": "a", "rejected": "b"}
    (row,) = of_file(model, "dpo", written(tmp_path / "choices.jsonl", choice)).rows
    assert row.answers == {"chosen": "a", "rejected": "b"}


def test_rows_that_cannot_be_read_say_why(model: Path, tmp_path: Path) -> None:
    assert "does not exist" in of_file(model, "sft", {"path": str(tmp_path / "none.jsonl")}).problem
    assert "the trainer alone reads" in of_file(model, "sft", {"path": "owner/rows"}).problem
    odd = written(tmp_path / "odd.jsonl", {"messages": "x"}, {"messages": [{"role": 1}]})
    assert [bool(row.problem) for row in of_file(model, "sft", odd).rows] == [False, True]
