"""HTTP answers to mistakes, and to unforeseen failures."""

from __future__ import annotations

import asyncio
import copy
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from structlog.testing import capture_logs

from opentinker.services.scheduler.http.errors import last_resort
from opentinker.shared.state.store import Store
from tests.conftest import soon
from tests.support.api import SPEC, Http


def configured(text: str) -> dict[str, Any]:
    spec = copy.deepcopy(SPEC)
    spec["environment"] = {"name": "gsm8k", "config": {"instruction": text, "split": "train"}}
    return spec


@pytest.mark.parametrize("length", [255, 256, 4096, 4097, 50_000])
@pytest.mark.parametrize("character", ["x", "\u00fc", "\u202e"])
async def test_a_text_of_any_length_without_a_slash_is_a_text(http: Http, length: int, character: str) -> None:
    for path, expected in (("/v1/validate", 200), ("/v1/jobs", 201)):
        status, said = await http("POST", path, json=configured(character * length))
        assert status == expected, said


@pytest.mark.parametrize(
    "base", ["/proc/1/root/x", "/proc/self/root/etc", "/root/../proc/1/cwd", "\0/x", "/" + "x" * 300]
)
async def test_a_place_that_cannot_be_looked_at_is_refused_in_words(http: Http, base: str) -> None:
    for path, expected in (("/v1/validate", 200), ("/v1/jobs", 422)):
        status, said = await http("POST", path, json={**SPEC, "model": {"base": base}})
        assert status == expected, said
        mistakes = said["mistakes" if status == 200 else "errors"]
        assert [mistake["field"] for mistake in mistakes] == ["model.base"]


async def test_what_nobody_foresaw_is_a_problem_with_an_id_that_the_log_has(http: Http, store: Store) -> None:
    """A job's record in Redis that somebody has spoilt."""
    job = await http.job()
    await store.redis.hset(f"job:{job}", "spec", "not JSON")
    with capture_logs() as lines:
        for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/v1/models"):
            async with http.session.get(http.url + path) as response:
                said = await response.json(content_type=None)
                assert response.status == 500 and "aiohttp" not in response.headers["Server"]
            logged = next(line for line in lines if line["event"] == "request_failed" and line["path"] == path)
            assert logged["id"] in str(said) and "JSON" not in str(said) and logged["exc_info"] is not None
            if not path.endswith("models"):
                assert (response.content_type, said["title"]) == ("application/problem+json", "Internal error")


async def test_a_connection_of_ours_that_broke_is_a_problem_like_any_other() -> None:
    async def handler(_: web.Request) -> web.Response:
        raise ConnectionRefusedError("another server's")

    app = web.Application(middlewares=[last_resort])
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client, client.get("/") as response:
        assert (response.status, response.content_type) == (500, "application/problem+json")


async def test_no_answer_tells_versions(http: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(http.url).port)
    writer.write(b"\x16\x03\x01 no request\r\n\r\n")
    answer = await soon(reader.read())
    writer.close()
    assert answer.startswith(b"HTTP/1.") and b"aiohttp" not in answer and b"Python" not in answer
