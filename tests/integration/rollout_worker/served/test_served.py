"""Environments that their users serve: a process behind a WebSocket, seen as rollout workers see it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from opentinker.client import AsyncClient
from opentinker.envs.base import user
from opentinker.sdk.http import ApiError
from opentinker.serve.ws_client import AsyncServing
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import Ending
from tests.conftest import NewContext, until
from tests.integration.rollout_worker.served.served_episodes import Counting, Episode, serving
from tests.samples.slow_imports import Gate, alive_importers
from tests.support.api import bearing
from tests.support.factories import make_spec
from tests.support.http_server import http_server
from tests.support.scheduling import scheduler


async def test_the_serving_process_plays(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url) as served:
        assert served.environment == "served:count"
        episode = Episode(bus, job, "count")
        reply = await episode.open(limit=2)
        assert reply.failure is None and reply.messages == [user("row 3 seed 4")]
        assert reply.worker.startswith("served-")
        first, again = await episode.step(0, "a"), await episode.step(0, "a")
        assert first == again and first.messages == [user("turn 0: a")] and first.reward == 1.0
        last = await episode.step(1, "b")
        assert last.done and environment.played == [0, 1]
        await episode.close()
        await until(lambda: served.active == 0)


async def test_import_in_the_serving_process_takes_no_time_of_the_episode(
    url: str, bus: Bus, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    clocks: list[str] = []

    @contextmanager
    def stopped() -> Iterator[None]:
        clocks.append("stopped")
        yield
        clocks.append("runs")

    async with serving(gate.environment, url):
        episode = Episode(bus, job, "count")
        episode.importing = stopped
        began, deadline_s = time.monotonic(), 3.0
        opened = asyncio.create_task(episode.open(deadline_s))
        await until(lambda: time.monotonic() > began + deadline_s)
        assert clocks == ["stopped"] and not opened.done()
        gate.file.touch()
        reply = await opened
        assert reply.failure is None, reply.error
        assert clocks == ["stopped", "runs"]
        assert (await episode.step(0)).reward == 1.0
        await episode.close()


async def test_import_in_the_serving_process_ends_at_the_operators_deadline(
    bus: Bus, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_context: NewContext
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    limited = new_context(env_import_timeout_s=2.0)
    async with limited as ctx, scheduler(ctx) as url, serving(gate.environment, url) as served:
        late = await Episode(bus, job, "count").open()
        assert late.failure == Ending.ENV_TIMEOUT
        assert "was not imported within 2 s (operator setting env_import_timeout_s)" in late.error
        await until(lambda: served.active == 0 and not alive_importers(gate))


async def test_who_serves_is_listed_and_seen_among_the_workers(url: str, environment: type[Counting]) -> None:
    async with aiohttp.ClientSession(headers=bearing()) as http:

        async def listed() -> list[Any]:
            async with http.get(f"{url}/v1/served") as response:
                found: list[Any] = (await response.json())["served"]
                return found

        async with serving(environment, url, concurrency=7), serving(environment, url, concurrency=8):
            await until(
                listed,
                lambda found: (
                    [(e["environment"], e["processes"], e["capacity"]) for e in found] == [("served:count", 2, 15)]
                ),
            )
        await until(listed, lambda found: found == [])


async def test_two_processes_share_the_load(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url, concurrency=2) as one:
        episodes = [Episode(bus, job, "count") for _ in range(4)]
        first = [await episode.open() for episode in episodes[:2]]
        waiting = [asyncio.create_task(episode.open()) for episode in episodes[2:]]
        full = await Episode(bus, job, "count").open(deadline_s=3.0)
        assert full.failure == Ending.ENV_LOST and "full" in full.error
        async with serving(environment, url, concurrency=2) as two:
            second = await asyncio.gather(*waiting)
            assert {reply.worker for reply in first} != {reply.worker for reply in second}
            assert [reply.failure for reply in [*first, *second]] == [None] * 4
            assert (one.active, two.active) == (2, 2)
            for episode in episodes:
                await episode.close()


async def test_a_session_survives_a_disconnect(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        await episode.step(0)
        environment.gate.clear()
        step = asyncio.create_task(episode.step(1))
        await until(lambda: served._stage.sessions._sessions[episode.session].turn == 1)
        cut(served)
        await until(lambda: served.connections == 2)
        environment.gate.set()
        assert (await step).messages == [user("turn 1: x")]
        assert (await episode.step(2)).messages == [user("turn 2: x")]
        assert environment.played == [0, 1, 2]


def cut(served: AsyncServing) -> None:
    """The cable, so to speak."""
    assert served._socket is not None
    transport = served._socket._response.connection.transport  # type: ignore[union-attr]
    assert transport is not None
    transport.abort()


async def test_sessions_survive_the_scheduler(ctx: Context, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with AsyncExitStack() as stack:
        async with scheduler(ctx) as url:
            served = await stack.enter_async_context(serving(environment, url))
            episode = await Episode(bus, job, "count").begun()
            await episode.step(0)
        await until(lambda: not served.connected.is_set())
        step = asyncio.create_task(episode.step(1))
        ctx.settings = ctx.settings.model_copy(update={"http_port": int(url.rpartition(":")[2])})
        async with scheduler(ctx):
            assert (await step).messages == [user("turn 1: x")]
            assert environment.played == [0, 1]
            await served.close(drain_s=0.0)


async def test_either_of_two_schedulers_may_hold_the_connection(
    ctx: Context, url: str, bus: Bus, job: str, environment: type[Counting], new_context: NewContext
) -> None:
    async with new_context("scheduler-1") as other, scheduler(other) as second, serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        await episode.step(0)
        served._http.url = second
        cut(served)
        await until(lambda: served.connections == 2)
        for turn in range(1, 4):
            assert (await episode.step(turn)).failure is None
        assert environment.played == [0, 1, 2, 3]
        cut(served)
        served._http.url = url
        await until(lambda: served.connections == 3)
        assert (await episode.step(4)).failure is None


async def test_a_goodbye_ends_all_sessions(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url, drain_s=0.0) as served:
        episode = await Episode(bus, job, "count").begun()
        environment.gate.clear()
        step = asyncio.create_task(episode.step(0))
        await until(lambda: served._stage.sessions._sessions[episode.session].turn == 0)
    assert (await step).failure in (Ending.ENV_LOST, Ending.ENV_ERROR)


async def test_a_process_that_stays_away_loses_its_sessions(
    ctx: Context, bus: Bus, job: str, environment: type[Counting]
) -> None:
    async with scheduler(ctx, Gateway(ctx, away_s=0.3)) as url, serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        served._stopping = True
        cut(served)
        reply = await episode.step(0)
        assert reply.failure == Ending.ENV_LOST and "away" in reply.error


async def test_the_key_travels_in_the_header_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, environment: type[Counting], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, str | None]] = []

    async def look(request: aiohttp.web.Request) -> aiohttp.web.Response:
        asked.append((request.path_qs, request.headers.get("Authorization")))
        return aiohttp.web.Response(status=403)

    monkeypatch.setenv("OPENTINKER_API_KEY", "not-to-be-seen")
    async with http_server(aiohttp.web.get("/{any:.*}", look)) as url:
        with pytest.raises(ApiError) as refused:
            async with serving(environment, url):
                pass
    assert asked == [("/v1/served/count", "Bearer not-to-be-seen")]
    assert "not-to-be-seen" not in str(refused.value) + caplog.text


async def test_submission_asks_who_serves_it(ctx: Context, url: str, environment: type[Counting]) -> None:
    spec = make_spec(environment={"name": "served:count", "config": {"limit": "no number"}}).model_dump(mode="json")
    async with AsyncClient(url) as client:
        with pytest.raises(ApiError, match="opentinker env serve module:Class --name count"):
            await client.submit(spec)
        async with serving(environment, url):
            with pytest.raises(ApiError, match=r"environment\.config\.limit"):
                await client.submit(spec)
            record = await client.submit({**spec, "environment": {"name": "served:count"}})
            assert record["state"] == "queued"
            await until(
                lambda: ctx.store.job(record["id"]),
                lambda job: job.waiting_for and "served" not in job.waiting_for and "env worker" not in job.waiting_for,
            )  # nobody to serve its environment; it lacks workers still
        served = "a process that serves served:count"
        await until(lambda: ctx.store.job(record["id"]), lambda job: served in job.waiting_for)
