"""Environments served from threads and from child processes of one serving process."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from typing import Any

import aiohttp
import pytest

from opentinker.envs.base import Action, Environment, Step, user
from opentinker.envs.game import AbstractGame, StepResult
from opentinker.envs.runtime.in_process_server import InProcessServer
from opentinker.sdk.http import ApiError
from opentinker.serve.ws_client import serve_environment
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import SessionReply
from tests.integration.rollout_worker.served.served_episodes import Episode, serving
from tests.samples.env_samples import Shuffled
from tests.support.http_server import http_server
from tests.support.playing import opening, step


class Blocking(Environment):
    """Blocks its thread until its barrier is whole: four at once, or none."""

    blocking = True
    together = threading.Barrier(4)

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user("wait")]

    async def step(self, action: Action) -> Step:
        self.together.wait(5.0)
        return Step(reward=1.0, done=True)


async def drawn(rows: list[int]) -> list[list[str]]:
    """Return the draws of each session; they are played side by side."""
    stage = InProcessServer(Shuffled, 4)

    async def one(row: int) -> list[str]:
        session = f"row {row}"
        replies: list[SessionReply] = [await stage.play("open", opening("", session, row=row, seed=4))]
        for turn in range(2):
            replies.append(await stage.play("step", step(turn, session=session)))
        return [reply.messages[0].text for reply in replies]

    try:
        return await asyncio.gather(*map(one, rows))
    finally:
        await stage.close(0.0)


async def test_sessions_in_threads_draw_what_each_would_draw_alone() -> None:
    alone = [*await drawn([1]), *await drawn([2])]
    assert alone[0] != alone[1]
    assert await drawn([1, 2]) == alone


async def test_a_blocking_class_is_served_from_a_background_thread(url: str, bus: Bus, job: str) -> None:
    served = await asyncio.to_thread(lambda: serve_environment(Blocking, name="block", url=url))
    try:
        assert served.connected and served.environment == "served:block"
        episodes = [Episode(bus, job, "block") for _ in range(4)]
        assert [(await episode.open()).failure for episode in episodes] == [None] * 4
        replies = await asyncio.gather(*(episode.step(0) for episode in episodes))
        assert [reply.done for reply in replies] == [True] * 4
    finally:
        await asyncio.to_thread(served.close)
    assert not served._thread.is_running


async def test_a_server_that_refuses_is_an_error_at_once() -> None:
    async def no(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(status=401)

    async with http_server(aiohttp.web.get("/{any:.*}", no)) as url:
        with pytest.raises(ApiError, match="OPENTINKER_API_KEY"):
            await asyncio.to_thread(lambda: serve_environment(Blocking, name="x", url=url))


async def test_blocking_modules_get_children(url: str, bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    async with serving("tests.samples.env_samples:Blocking", url, concurrency=2):
        episodes = [Episode(bus, job, "count") for _ in range(2)]
        processes = {(await episode.open()).messages[0].text for episode in episodes}
        assert len(processes) == 2 and str(os.getpid()) not in processes
        assert (await episodes[0].step(0)).failure is None
        crashed = Episode(bus, job, "count")
        await episodes[1].close()
        await crashed.open(how="crash")
        reply = await crashed.step(0)
        assert reply.failure == Ending.ENV_ERROR and "exit status 7" in reply.error


class Draw(AbstractGame):
    """Draws from the global random numbers, slowly: whoever else draws meanwhile would change what it sees."""

    def reset(self, **_: Any) -> str:
        numbers = []
        for _turn in range(3):
            numbers.append(random.randint(0, 999))
            time.sleep(0.002)
        return str(numbers)

    def step(self, action: str) -> StepResult:
        return StepResult(observation="", reward=1.0, done=True, info={})

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return ""


async def test_the_episodes_of_a_group_of_a_game_begin_alike_in_threads_too(url: str, bus: Bus, job: str) -> None:
    async with serving(Draw, url):
        opened = await asyncio.gather(*(Episode(bus, job, "count").open() for _ in range(6)))
    assert [reply.failure for reply in opened] == [None] * 6
    assert len({reply.messages[-1].text for reply in opened}) == 1
