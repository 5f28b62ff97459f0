"""Rows of a job's data set over HTTP, in the client and the command line: prompts, tokens, and how each was played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.cli.rows import percent
from opentinker.client import ApiConflict, ApiError, ApiNotFound, AsyncClient, answers
from opentinker.services.scheduler.data_rows.row_table import of_evaluation, of_training
from opentinker.services.scheduler.jobs.eval_coordinator import RESULTS
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import EnvRows
from tests.integration.scheduler.test_eval_jobs import eval_spec, result
from tests.support.api import OPERATOR, Http, bearing, fits, new_key_of
from tests.support.factories import make_spec
from tests.support.listed_rows import count_rows, rows_listed
from tests.support.toys import toy_model

JOB = "j-rows000000"


@pytest.fixture
async def asked(bus: Bus) -> AsyncIterator[list[EnvRows]]:
    async with rows_listed(bus) as requests:
        yield requests


async def made(store: Store, id: str = JOB, **changes: Any) -> str:
    spec = make_spec(**({"environment": {"name": "gsm8k"}} | changes)).model_dump(mode="json")
    return await store.create_job(id=id, spec=spec, tenant="default")


async def test_rows_have_their_prompts_and_how_they_were_played(
    client: AsyncClient, ctx: Context, store: Store, asked: list[EnvRows], tmp_path: Path
) -> None:
    model = str(toy_model(tmp_path / "model"))
    job = await made(store, model={"base": model})
    count_rows(ctx.settings.data_dir / "jobs" / job)
    page = await client.rows(job, limit=3)
    fits(page, answers.DataRows)
    assert (page["count"], page["total"], page["played"], page["source"]) == (7473, 7473, 3, "gsm8k")
    assert (page["solved_at"], page["first_step"], page["note"]) == (1.0, 0, "")
    first, second, third = page["rows"]
    assert first["prompt"].startswith("Natalia sold clips") and first["tokens"] == len(first["prompt"])
    assert (first["played"], first["solved"], first["reward"], first["kept"]) == (160, 1.0, 1.0, [1, 40])
    assert (second["played"], second["solved"], second["reward"], second["series"]) == (0, None, None, [])
    assert third["solved"] == 0.125 and third["reward"] == pytest.approx(sum(range(1, 41)) / 40 / 160)
    assert len(third["series"]) == 20 and third["series"][-1] == {"step": 40, "played": 8, "solved": 0.25}
    assert sum(point["played"] for point in third["series"]) == 160
    (only,) = asked
    assert only.numbers == [0, 1, 2], "a page in the order of rows is one question"


async def test_rows_are_found_sorted_and_paged(
    client: AsyncClient, ctx: Context, store: Store, asked: list[EnvRows]
) -> None:
    job = await made(store)
    count_rows(ctx.settings.data_dir / "jobs" / job)

    async def numbers(**wanted: Any) -> list[int]:
        return [row["row"] for row in (await client.rows(job, **{"limit": 4, **wanted}))["rows"]]

    assert await numbers(sort="solved") == [2, 9, 0, 1]
    assert await numbers(sort="-solved") == [0, 9, 2, 1]
    assert await numbers(sort="-played", limit=2, offset=1) == [2, 9]
    assert await numbers(sort="-row", limit=1) == [7472]
    assert await numbers(most_solved=50, sort="-reward") == [9, 2]
    assert await numbers(least_solved=13, most_solved=99) == [9]
    assert await numbers(solved_above=0, solved_below=100) == [2, 9]
    assert await numbers(text="natalia SOLD clips") == [0] and await numbers(text="natalia sold", most_solved=5) == []
    assert await numbers(offset=7473) == []
    page = await client.rows(job, text="natalia", limit=1)
    assert page["total"] > 1 and page["searched"] == 7473
    assert page["note"] == "the tokenizer of model is not on the server's machine"


async def test_rows_that_do_not_fit_into_one_answer_are_asked_for_again(
    client: AsyncClient, store: Store, bus: Bus
) -> None:
    job = await made(store)
    async with rows_listed(bus, reply_bytes=700) as asked:
        page = await client.rows(job, limit=5)
    assert [row["row"] for row in page["rows"]] == [0, 1, 2, 3, 4] and len(asked) > 1


async def test_a_job_without_rows_is_told_so(client: AsyncClient, store: Store, asked: list[EnvRows]) -> None:
    games = await made(store, environment={"name": "copy_digits"})
    with pytest.raises(ApiNotFound, match="copy_digits, makes up its episodes, or does not list its rows"):
        await client.rows(games)
    chat = {"name": "chat", "kind": "inference", "model": {"base": "m"}}
    await store.create_job(id="j-chat000000", spec=parse_spec(chat).model_dump(mode="json"), tenant="default")
    with pytest.raises(ApiNotFound, match="of kind inference, and has no rows: only rl"):
        await client.rows("j-chat000000")
    served = await made(store, "j-served0000", environment={"name": "https://games.example/x"})
    with pytest.raises(ApiNotFound, match="is played elsewhere"):
        await client.rows(served)
    wrong = await made(store, "j-wrong00000", environment={"name": "math", "config": {"path": "/no/such.jsonl"}})
    with pytest.raises(ApiConflict, match=r"the rows of math cannot be listed: .*does not exist"):
        await client.rows(wrong)


async def test_without_an_env_worker_the_answer_says_what_to_start(client: AsyncClient, store: Store) -> None:
    with pytest.raises(ApiConflict, match="no env worker is running"):
        await client.rows(await made(store))


async def test_other_tenants_rows_look_unknown_and_wrong_bounds_are_named(
    http: Http, api: Http, store: Store, asked: list[EnvRows]
) -> None:
    job = await made(store)
    other = bearing(await new_key_of(store, "other"))
    assert (await api("GET", f"/v1/jobs/{job}/rows", headers=other))[0] == 404
    for query, field in (
        ("limit=101", "limit"), ("limit=0", "limit"), ("offset=-1", "offset"), ("least_solved=101", "least_solved"),
        ("solved_above=-1", "solved_above"), ("solved_below=0.5", "solved_below"),
        ("sort=tokens", "sort"), (f"text={'x' * 201}", "text"), ("policy=white", "policy"),
    ):  # fmt: skip
        status, body = await http("GET", f"/v1/jobs/{job}/rows?{query}")
        assert status == 422 and [mistake["field"] for mistake in body["errors"]] == [field]
    assert asked == []
    for text in ("%ff", "%ED%A0%80", "%00", "%F0%9F%98%80", "a%26b"):
        status, body = await http("GET", f"/v1/jobs/{job}/rows?text={text}&offset={2**40}")
        assert status == 200 and body["rows"] == [], (text, body)


async def test_an_eval_job_counts_its_results(
    client: AsyncClient, ctx: Context, store: Store, asked: list[EnvRows]
) -> None:
    plan = {"episodes": 2, "samples": 2, "temperature": 1.0, "transcripts": 1, "solved_at": 0.5}
    spec = eval_spec(environment={"name": "gsm8k"}, evaluation=plan).model_dump(mode="json")
    job = await store.create_job(id="j-evaluated0", spec=spec, tenant="default")
    home = ctx.settings.data_dir / "jobs" / job
    home.mkdir(parents=True)
    results = [
        *(result(0, 1.0, row=0), result(1, 0.5, row=0), result(2, 0.0, row=1)),
        *(result(3, 0.0, ending=Ending.ENV_ERROR), result(0, 0.0, row=0)),
    ]
    lines = [msgspec.json.encode(msgspec.to_builtins(one)) for one in results]
    (home / RESULTS).write_bytes(b"\n".join([*lines, b'{"job":']))
    first, second = (await client.rows(job, limit=2))["rows"]
    assert (first["played"], first["solved"], first["reward"], first["kept"]) == (2, 1.0, 0.75, [0])
    assert (second["played"], second["solved"], second["kept"]) == (1, 0.0, [])


async def test_rows_of_an_sft_job_are_those_of_its_file(client: AsyncClient, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"prompt": f"q{n}", "completion": f"a{n}"}) + b"\n" for n in range(30)))
    spec = {
        "name": "sft", "kind": "sft", "model": {"base": str(toy_model(tmp_path / "model"))},
        "data": {"path": str(path)}, "train": {"steps": 1},
    }  # fmt: skip
    stored = parse_spec(spec).model_dump(mode="json")
    job = await store.create_job(id="j-sft0000000", spec=stored, tenant="default")
    page = await client.rows(job, text="a2", offset=1, limit=2)
    fits(page, answers.DataRows)
    assert [(row["row"], row["prompt"], row["tokens"], row["answers"]) for row in page["rows"]] == [
        (20, "q20", 3, {"completion": "a20"}), (21, "q21", 3, {"completion": "a21"}),
    ]  # fmt: skip
    assert (page["total"], page["count"], page["source"], page["solved_at"]) == (11, 30, str(path), None)
    with pytest.raises(ApiError, match="does not apply to a job of kind sft"):
        await client.rows(job, sort="-solved")
    path.unlink()
    with pytest.raises(ApiConflict, match="does not exist"):
        await client.rows(job)


async def test_the_command_line_shows_a_table_prompts_and_json(
    url: str, ctx: Context, store: Store, asked: list[EnvRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    job = await made(store)
    count_rows(ctx.settings.data_dir / "jobs" / job)

    async def said(*arguments: str) -> str:
        ended = await asyncio.to_thread(CliRunner().invoke, app, ["rows", job, "--url", url, *arguments])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    heading, columns, *lines = (await said("--sort", "-solved", "-n", "4")).splitlines()
    assert heading.startswith("rows 1 to 4 of 7,473 of gsm8k; 3 were played; solved: reward at least 1")
    assert columns.split() == ["row", "tokens", "played", "reward", "solved", "over", "steps", "prompt"]
    assert [line.split()[0] for line in lines] == ["0", "9", "2", "1"]
    assert "100 %" in lines[0] and "█" * 16 in lines[0] and "12 %" in lines[2] and "▁▁" in lines[2] and "▃" in lines[2]
    full = await said("--full", "-n", "3")
    assert "--- row 1: not played yet" in full and "episodes of steps 1, 40" in full
    assert orjson.loads(await said("--json", "--text", "natalia sold"))["rows"][0]["row"] == 0


def test_a_share_near_none_or_all_is_not_called_so() -> None:
    shares = [None, 0.0, 0.0001, 1 / 200, 0.125, 199 / 200, 0.9999, 1.0]
    assert [percent(share) for share in shares] == ["-", "0 %", "0.1 %", "0.5 %", "12 %", "99.5 %", "99.9 %", "100 %"]


def test_counts_of_absent_files_are_empty(tmp_path: Path) -> None:
    for found in (of_training(tmp_path), of_evaluation(tmp_path / RESULTS, 1.0, 8)):
        assert len(found.rows) == 0 and found.shown(0)["played"] == 0
