"""The client while its server does not answer, refuses for now, or takes long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from opentinker import ApiError, AsyncClient
from opentinker.sdk.inputs import refers_to_checkpoints
from opentinker.shared.runtime.service import Context
from tests.conftest import WAIT_S, free_port, soon, until
from tests.support.factories import make_spec
from tests.support.http_server import answering
from tests.support.scheduling import scheduler

SPEC = make_spec(model__base="some/model")


async def test_client_that_is_early_says_what_it_waits_for_and_goes_on(ctx: Context) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    notes: list[str] = []
    fixed = Context(**{**vars(ctx), "settings": ctx.settings.model_copy(update={"http_port": port})})
    async with AsyncClient(url, wait_s=WAIT_S, on_wait=notes.append) as client:
        submitting = asyncio.create_task(client.submit(SPEC))
        await until(lambda: notes)
        assert url in notes[0]
        async with scheduler(fixed):
            assert (await submitting)["state"] == "queued"
            assert len(await client.jobs()) == 1
    assert len(notes) == 1


async def test_unreachable_server_is_an_error_that_names_the_url(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with AsyncClient(url, wait_s=0.3) as client:
        for call in (client.jobs(), client.submit(SPEC), anext(client.events("j-0000000000"))):
            with pytest.raises(ApiError, match=url) as error:
                await call
            assert error.value.status is None
    assert url in caplog.text
    async with AsyncClient("nonsense", wait_s=0.3) as client:
        with pytest.raises(ApiError, match="nonsense"):
            await client.jobs()


async def test_answers_lost_on_the_way_are_asked_for_again_with_the_same_key() -> None:
    keys: list[str] = []

    async def create(request: web.Request) -> web.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"id": "j-1"}, status=503 if len(keys) == 2 else 201)

    async with answering(create) as url, AsyncClient(url) as client:
        assert (await client.submit(SPEC))["id"] == "j-1"
    assert len(keys) == 3 and len(set(keys)) == 1


async def test_reason_of_an_unavailable_server_reaches_the_user() -> None:
    detail = "checkpoints that the spec names were not copied within 600 s"
    notes: list[str] = []

    async def create(_: web.Request) -> web.Response:
        return web.json_response({"title": "Unavailable", "status": 503, "detail": detail}, status=503)

    async with answering(create) as url, AsyncClient(url, wait_s=0.3, on_wait=notes.append) as client:
        with pytest.raises(ApiError, match=detail) as error:
            await client.submit(SPEC)
    assert error.value.status == 503 and "cannot reach" not in str(error.value)
    assert notes == [f"waiting for {url} (it answered 503: {detail})"]


async def test_proxy_without_a_server_behind_it_is_an_unreachable_server() -> None:
    async def create(_: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")

    async with answering(create) as url, AsyncClient(url, wait_s=0.3) as client:
        with pytest.raises(ApiError, match=f"cannot reach {url}: it answered 502"):
            await client.submit(SPEC)


@pytest.mark.parametrize(
    ("more", "minutes"),
    [
        ({}, False),
        ({"start": {"from": "j-0000000000@1"}}, True),
        ({"serving": {"adapters": [{"name": "a", "from": "j-0000000000@1"}]}}, True),
    ],
)
async def test_only_submissions_that_may_copy_checkpoints_may_take_minutes(more: dict[str, Any], minutes: bool) -> None:
    """What the server does not answer within the client's `timeout_s` is asked again."""
    submissions = 0
    over = asyncio.Event()
    waiting = asyncio.create_task(over.wait())

    async def create(_: web.Request) -> web.Response:
        nonlocal submissions
        submissions += 1
        if submissions == 1:
            await asyncio.wait([waiting], timeout=1.0 if minutes else WAIT_S)
        return web.json_response({"id": "j-1"}, status=201)

    async with answering(create) as url, AsyncClient(url, timeout_s=0.3, wait_s=WAIT_S) as client:
        assert (await soon(client.submit(SPEC.model_dump(mode="json") | more)))["id"] == "j-1"
        over.set()
    assert submissions == (1 if minutes else 2)


def test_submissions_that_name_checkpoints_are_given_time_for_their_copies() -> None:
    frozen = {"frozen": "j-0123456789@latest"}
    for data in (
        {"seats": {"a": frozen}},
        {"validation": {"against": [{"bot": "random"}, frozen]}},
        {"start": {"from": "j-0123456789@1"}},
        {"policies": {"a": {}, "b": {"start": {"from": "j-0123456789~b@1"}}}},
    ):
        assert refers_to_checkpoints(data)
    for policies in ({"a": {}, "b": {"start": None}}, {"a": 3}, 3):
        assert not refers_to_checkpoints({"policies": policies})
    for against in ([{"bot": "random"}, 3], 3, None):
        assert not refers_to_checkpoints({"validation": {"against": against}})
