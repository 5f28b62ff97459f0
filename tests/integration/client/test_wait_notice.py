"""A client that waits for a server says so early, with the URL; calls that may not be repeated fail instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from opentinker import ApiError, AsyncClient, Client
from opentinker.envs.base import Environment
from opentinker.sdk import wait_notice
from opentinker.sdk.http import CONNECT_S
from opentinker.serve.ws_client import AsyncServing
from opentinker.shared.asyncio_tools import cancel_and_wait
from tests.conftest import WAIT_S, free_port, soon, until
from tests.support.factories import make_spec
from tests.support.http_server import socket_server

JOB = "j-0000000000"
Call = Callable[[AsyncClient, Path], Coroutine[Any, Any, Any]]


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


CALLS: dict[str, Call] = {
    "submit": lambda client, _: client.submit(make_spec(model__base="some/model")),
    "wait": lambda client, _: client.wait(JOB),
    "events": lambda client, _: _all(client.events(JOB)),
    "logs": lambda client, _: _all(client.logs(JOB)),
    "watch_metrics": lambda client, _: _all(client.watch_metrics(JOB)),
    "download": lambda client, place: client.download(JOB, place / "model"),
    "download_artifacts": lambda client, place: client.download_artifacts(JOB, place),
}
ONCE: dict[str, Call] = {
    "chat": lambda client, _: _all(client.chat(JOB, [{"role": "user", "content": "Hello."}])),
    "create_key": lambda client, _: client.create_key("viewer"),
}


@asynccontextmanager
async def mute() -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A server that takes what is asked and answers nothing: its URL, that it was asked, and that it hangs up."""
    asked, over = asyncio.Event(), asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await over.wait()
        writer.close()

    async with socket_server(hear) as url:
        try:
            yield url, asked, over
        finally:
            over.set()


def test_the_word_comes_within_three_seconds() -> None:
    assert max(CONNECT_S, wait_notice.WORD_S) < 3.0, (
        "a try that connects to nothing ends, one without an answer is said"
    )


@pytest.mark.parametrize("name", CALLS)
async def test_a_closed_port_is_said_at_the_first_try(name: str, tmp_path: Path) -> None:
    url, notes = f"http://127.0.0.1:{free_port()}", list[str]()
    async with AsyncClient(url, wait_s=WAIT_S, on_wait=notes.append) as client:
        call = asyncio.create_task(CALLS[name](client, tmp_path))
        await until(lambda: notes or call.done())
        assert not call.done() and len(notes) == 1 and notes[0].startswith(f"waiting for {url} (")
        await cancel_and_wait(call)


@pytest.mark.parametrize("name", [*CALLS, *ONCE])
async def test_a_silent_server_is_reported(name: str, tmp_path: Path) -> None:
    notes: list[str] = []
    async with mute() as (url, asked, _), AsyncClient(url, wait_s=WAIT_S, on_wait=notes.append) as client:
        client._http.word_s = 0.01
        call = asyncio.create_task((CALLS | ONCE)[name](client, tmp_path))
        await soon(asked.wait())
        await until(lambda: notes or call.done())
        assert not call.done() and notes == [f"waiting for {url} (no answer for 0.01 s)"]
        await cancel_and_wait(call)


@pytest.mark.parametrize("name", ["chat", "create_key"])
async def test_what_is_asked_once_fails_with_the_url_where_nobody_listens(name: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with AsyncClient(url, wait_s=WAIT_S) as client:
        with pytest.raises(ApiError, match=url):
            await soon(ONCE[name](client, tmp_path))


async def test_a_server_that_answers_in_time_is_not_waited_for() -> None:
    notes: list[str] = []
    async with mute() as (url, asked, over), AsyncClient(url, wait_s=WAIT_S, on_wait=notes.append) as client:
        client._http.word_s = 3600.0
        call = asyncio.create_task(_all(client.events(JOB)))
        await soon(asked.wait())
        assert notes == []
        over.set()  # it hangs up: the first try has failed
        await until(lambda: notes)
        assert "no answer" not in notes[0] and not call.done()
        await cancel_and_wait(call)


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def said(name: str, number: int) -> bytes:
    """A line of the stream of events, or of logs."""
    event = {"event": "x", "id": f"{number}-0"} if name == "events" else {"event": "x", "cursor": number}
    return b"data: " + orjson.dumps(event) + b"\n\n"


@asynccontextmanager
async def breaking(
    streams: Callable[[int], bytes | None], *, ends: bool = False
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that says this on the first, second, ... stream, and breaks it off, or `ends` it. Its job goes on until
    it is None: its URL, and the streams that were asked for."""
    asked: list[str] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        said, body = streams(len(asked)), b""
        if "/events" in path or "/logs" in path:
            asked.append(path)
            body = HEADERS + (b"%x\r\n%b\r\n" % (len(said), said) if said else b"")
            body += b"0\r\n\r\n" if ends or said is None else b""
        else:
            over = said is None
            job = orjson.dumps({"state": "failed" if over else "running", "finished": 1.0 if over else None})
            body = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(job), job)
        writer.write(body)
        await writer.drain()
        writer.close()

    async with socket_server(hear) as url:
        yield url, asked


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("what", ["the same", "nothing new", "headers alone"])
@pytest.mark.parametrize("name", ["events", "logs"])
async def test_a_stream_without_progress_is_given_up(name: str, what: str, ends: bool) -> None:
    """A proxy with nothing behind it answers with headers alone: they are no news of the job."""
    line = {"the same": said(name, 7), "nothing new": b": nothing new\n\n", "headers alone": b""}[what]
    notes: list[str] = []
    async with (
        breaking(lambda _: line, ends=ends) as (url, asked),
        AsyncClient(url, wait_s=0.5, on_wait=notes.append) as client,
    ):
        following = client.events(JOB) if name == "events" else client.logs(JOB)
        seen = []
        with pytest.raises(ApiError, match=f"the stream from {url} breaks off each time before anything new comes"):
            async for one in following:
                seen.append(one["event"])
    assert len(asked) > 2 and len(seen) == (1 if b"data" in line else 0), "it is said once"
    assert len(notes) == 1 and notes[0].startswith(f"waiting for {url} (")


@pytest.mark.parametrize("name", ["events", "logs"])
async def test_a_stream_that_breaks_off_with_something_new_each_time_is_followed(name: str, tmp_path: Path) -> None:
    """However long that takes, and whether or not it repeats itself: a server that is started again and again."""
    lines = [said(name, max(1, number - 1)) + said(name, number) for number in range(1, 8)]
    async with (
        breaking(lambda number: lines[number] if number < len(lines) else None) as (url, asked),
        AsyncClient(url, wait_s=0.5, on_wait=lambda _: None) as client,
    ):
        following = client.events(JOB) if name == "events" else client.logs(JOB)
        seen: list[Any] = [one async for one in following]
    numbers = [int(one["id"].removesuffix("-0")) if name == "events" else one["cursor"] for one in seen]
    assert numbers == list(range(1, 8))
    assert [path.partition("after=")[2].split("&")[0].split("-")[0] for path in asked] == list("01234567")


async def test_a_quiet_stream_that_breaks_off_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it stood: nobody was waited for as long as it did."""
    clock = [0.0]
    monkeypatch.setattr(wait_notice, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    notes: list[str] = []
    waiting = wait_notice.Waiting("there", notes.append)
    for _ in range(3):
        with waiting.for_answer():
            clock[0] += 1.0
        with pytest.raises(ConnectionError), waiting.standing():
            clock[0] += 60.0
            raise ConnectionError
        waiting.failed("it broke off")
    assert waiting.away_s == 3.0 and len(notes) == 1
    with pytest.raises(TimeoutError), waiting.standing():
        clock[0] += 30.0
        raise TimeoutError
    assert waiting.away_s == 33.0, "it was silent until it was given up"
    with waiting.standing():
        waiting.answered()
        clock[0] += 60.0
    assert waiting.away_s == 0.0


def test_the_other_face_says_it_too(tmp_path: Path) -> None:
    url, notes = f"http://127.0.0.1:{free_port()}", list[str]()
    with Client(url, wait_s=0.3, on_wait=notes.append) as client:
        for following in (client.events(JOB), client.logs(JOB), client.watch_metrics(JOB)):
            with pytest.raises(ApiError, match=url):
                next(following)
            assert len(notes) == 1 and url in notes.pop()


async def test_serve_reports_a_server_that_never_answers() -> None:
    notes: list[str] = []
    async with mute() as (url, asked, _):
        serving = AsyncServing(Environment, name="count", url=url, on_wait=notes.append)
        serving._http.word_s = 0.01
        beginning = asyncio.create_task(serving.__aenter__())
        await soon(asked.wait())
        await until(lambda: notes)
        assert notes[0] == f"waiting for {url} (no answer for 0.01 s)"
        await cancel_and_wait(beginning)
        await serving.close(drain_s=0.0)


# --- what may not be done twice ---------------------------------------------------------------------------------------


@asynccontextmanager
async def losing() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that does what is asked, and whose answers are lost: its URL, and the requests."""
    asked: list[str] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().rsplit(" ", 1)[0])
        writer.close()

    async with socket_server(hear) as url:
        yield url, asked


async def test_what_would_be_another_thing_the_second_time_is_asked_once() -> None:
    async with losing() as (url, asked), AsyncClient(url, wait_s=WAIT_S) as client:
        with pytest.raises(ApiError, match="may have been done or not"):
            await soon(client.delete_environment("count"))
        assert asked == ["DELETE /v1/environments/count"]
        with pytest.raises(ApiError, match="may have been done or not"):
            await soon(client.publish(f"{JOB}@latest", "best"))
        assert asked[1:] == ["POST /v1/published"]
        with pytest.raises(ApiError, match="may have been done or not"):
            await soon(client.unpublish("best"))
        assert asked[2:] == ["DELETE /v1/published/best"]


async def test_a_step_that_is_named_is_published_by_asking_again() -> None:
    async with losing() as (url, asked), AsyncClient(url, wait_s=0.5, on_wait=lambda _: None) as client:
        with pytest.raises(ApiError, match="cannot reach"):
            await client.publish(f"{JOB}@7", "best")
        assert len(asked) > 1
