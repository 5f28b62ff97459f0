"""Environments behind URLs: the wire of environment servers over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from opentinker.envs.base import user
from opentinker.envs.registry import check, find
from opentinker.envs.runtime.resolver import Resolver
from opentinker.local.processes import free_port
from opentinker.shared.security.egress import VARIABLE
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.integration.rollout_worker.remote.remote_sessions import Game, Playing, server

pytestmark = pytest.mark.usefixtures("loopback_allowed")


@asynccontextmanager
async def played(game: Game, **config: Any) -> AsyncIterator[Playing]:
    """An episode that has begun."""
    async with server(game) as url:
        playing = Playing(url, **config)
        await playing.open()
        yield playing


NUMBER = random.Random(5).randint(0, 99)
GOLD = "yes" if NUMBER % 2 else "no"


async def test_an_environment_server_is_played_over_http() -> None:
    game = Game()
    async with server(game) as url:
        playing = Playing(url, config={"difficulty": "easy"}, job_id="mine")
        opened = await playing.open()
        assert opened.messages == [Message(role="system", content="Say yes or no."), user(f"Is {NUMBER} odd?")]
        last = await playing.step(0, GOLD)
        assert (last.reward, last.done, last.metrics) == (1.0, True, {"right": 1.0, "tries": 1.0})
        await playing.close()
    (_, reset), (_, step) = game.requests
    assert reset == {"difficulty": "easy", "row": 3, "seed": 5, "instance_id": step["instance_id"], "job_id": "mine"}
    assert step == {"action": GOLD, "instance_id": reset["instance_id"], "job_id": "mine"}


async def test_siblings_begin_alike_and_are_not_told_what_they_should_not_be() -> None:
    game = Game()
    async with server(game) as url:
        opened = [await Playing(url, row_key="").open() for _ in range(3)]
    assert len({reply.messages[1].text for reply in opened}) == 1
    assert all("row" not in body for _, body in game.requests)
    assert len(game.instances) == 3


@pytest.mark.parametrize(
    ("answer", "ending", "reason"),
    [
        (500, Ending.ENV_ERROR, "answered 500: planned"),
        (503, Ending.ENV_LOST, "answered 503: planned"),
        (302, Ending.ENV_ERROR, "answered 302"),
        (b"not json", Ending.ENV_BAD_REPLY, "JSON object"),
        (b"[]", Ending.ENV_BAD_REPLY, "JSON object"),
        (b"x" * 2_000_000, Ending.ENV_BAD_REPLY, "more than"),
        ({"reward": "much"}, Ending.ENV_BAD_REPLY, "reward must be a number"),
        (b'{"observation": "", "reward": 1e999, "done": true}', Ending.ENV_BAD_REPLY, ""),
        ({"done": "yes"}, Ending.ENV_BAD_REPLY, "done must be True or False"),
        ({"observation": 5}, Ending.ENV_BAD_REPLY, "observation"),
        ({"observation": "x" * 300_000, "done": False}, Ending.ENV_BAD_REPLY, "bytes of messages"),
        ({"info": 5}, Ending.ENV_BAD_REPLY, "info"),
    ],
)
async def test_what_a_server_answers_is_checked(answer: Any, ending: Ending, reason: str) -> None:
    async with played(game := Game()) as playing:
        game.answers = [answer]
        reply = await playing.step(0, GOLD)
        assert reply.failure == ending and reason in reply.error
        assert "Traceback" not in reply.error


async def test_a_forgotten_instance_ends_the_episode_with_its_reason() -> None:
    async with played(game := Game()) as playing:
        game.instances.clear()
        reply = await playing.step(0, GOLD)
        assert reply.failure == Ending.ENV_LOST and "does not know this instance" in reply.error


async def test_a_step_is_never_sent_twice_and_hanging_ends_at_the_deadline() -> None:
    game = Game()
    async with server(game) as url:
        playing = Playing(url, deadline_s=2.0)
        await playing.open()
        game.hang.clear()
        reply = await playing.step(0, GOLD)
        assert reply.failure == Ending.ENV_TIMEOUT
        slow = Playing(url, request_timeout_s=1.0)
        game.hang.set()
        await slow.open()
        game.hang.clear()
        reply = await slow.step(0, GOLD)
        assert reply.failure == Ending.ENV_ERROR
    assert [route for route, _ in game.requests if route != "finalize"] == ["reset", "step", "reset", "step"]


async def test_a_server_that_is_away_is_waited_for_at_the_reset_and_then_given_up() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    gone = await Playing(url, patience_s=0.2).open()
    assert gone.failure == Ending.ENV_LOST and "Cannot connect" in gone.error
    opening = asyncio.create_task(Playing(url, patience_s=10.0).open())
    await asyncio.sleep(0)
    async with server(Game(), port):
        assert (await opening).failure is None


async def test_an_open_that_found_nobody_may_be_asked_for_again_under_the_same_id() -> None:
    port = free_port()
    playing = Playing(f"http://127.0.0.1:{port}", patience_s=0.0)
    assert (await playing.open()).failure == Ending.ENV_LOST
    async with server(Game(), port):
        assert (await playing.open()).failure is None
        await playing.close()


async def test_forbidden_urls_are_refused_at_submission_and_play(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game()
    async with server(game) as url:
        resolver = Resolver(modules=False)
        await resolver.check(url, {})
        monkeypatch.setenv(VARIABLE, "")
        with pytest.raises(SpecError, match="loopback"):
            await resolver.check(url, {})
        reply = await Playing(url).open()
        assert reply.failure == Ending.ENV_ERROR and "env_egress_allow" in reply.error
    assert game.requests == []
    for wrong, problem in (("http://user@h/", "user name"), ("http://h:22/", "port 22"), ("ws://", "form")):
        with pytest.raises(SpecError, match=problem):
            find(wrong)
    with pytest.raises(SpecError, match=r"environment\.config\.concurrency"):
        check("http://example.org/", {"concurrency": 0})


async def test_requests_at_once_are_limited_per_url_and_connections_end_with_the_episodes() -> None:
    game = Game()
    async with server(game) as url:
        playing = [Playing(url, concurrency=2) for _ in range(4)]
        for one in playing:
            await one.open()
        game.hang.clear()
        steps = [asyncio.create_task(one.step(0, GOLD)) for one in playing]
        await until(lambda: len(game.requests) == 6)
        assert len(game.requests) == 6
        game.hang.set()
        assert all(reply.done for reply in await asyncio.gather(*steps))
        pools = find(url).pools  # type: ignore[attr-defined]
        (pool,) = pools.values()
        for one in playing:
            await one.close()
        assert (pool.users, pool._session, pools) == (0, None, {})


async def test_who_waits_for_a_place_has_its_whole_time_for_the_answer() -> None:
    game = Game()
    game.takes_s = 0.25
    async with server(game) as url:
        playing = [Playing(url, concurrency=1, request_timeout_s=2.0, patience_s=0.0) for _ in range(12)]
        opened = await asyncio.gather(*(one.open() for one in playing))
        assert [reply.failure for reply in opened] == [None] * 12
        game.takes_s = 0.0
        for one in playing:
            await one.close()


async def test_a_server_is_told_of_games_that_were_cut_off() -> None:
    game = Game()
    async with server(game) as url:
        for answers in (0, 1):
            playing = Playing(url)
            await playing.open()
            for turn in range(answers):
                await playing.step(turn, GOLD)
            await playing.close()
    assert [route for route, _ in game.requests] == ["reset", "finalize", "reset", "step"]
