"""Game servers: idle games, the limit of games, numbers of games left early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiohttp.test_utils import TestClient, TestServer

from opentinker.environment import base_game_server
from opentinker.environment.base_game_server import BaseGameStats, GameRoutes, app_of
from tests.conftest import WAIT_S, until
from tests.samples.published_games import HigherLower


class Told(HigherLower):
    """Says where it was made, and which of its games were closed."""

    threads: ClassVar[set[int]] = set()
    closed: ClassVar[list[int]] = []

    def __init__(self, tries: int = 3) -> None:
        super().__init__(tries=tries)
        self.threads.add(threading.get_ident())

    def get_state(self) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        return {"left": self.left}

    def close(self) -> None:
        self.closed.append(self.secret)
        if self.secret == 9:
            raise OSError("the board sticks")


class Site:
    def __init__(self, http: TestClient[Any, Any], routes: GameRoutes, clock: list[float]) -> None:
        self.http, self.routes, self.clock = http, routes, clock

    async def post(self, path: str, instance: str, **body: Any) -> tuple[int, Any]:
        response = await self.http.post(path, json={"instance_id": instance, **body})
        return response.status, await (response.json() if response.status == 200 else response.text())

    async def stats(self) -> dict[str, float]:
        return dict(await (await self.http.get("/stats")).json())


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    clock = [1000.0]
    Told.threads.clear()
    Told.closed.clear()
    monkeypatch.setattr(base_game_server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    routes = GameRoutes(Told, None, {})
    async with TestClient(TestServer(app_of(routes))) as http:
        yield Site(http, routes, clock)


async def test_a_full_server_forgets_idle_games(site: Site) -> None:
    site.routes.most_games = 2
    assert (await site.post("/reset", "a", secret=1))[0] == 200
    assert (await site.post("/reset", "b", secret=9))[0] == 200
    assert (await site.post("/reset", "c"))[0] == 503
    assert (await site.post("/reset", "a", secret=2))[1]["game_state"] == {"left": 3}
    site.clock[0] += base_game_server.IDLE_S - 1
    assert (await site.post("/step", "a", action="8"))[0] == 200
    assert (await site.post("/reset", "c"))[0] == 503
    site.clock[0] += 1
    status, _ = await site.post("/reset", "c")  # b, whose end fails, is nobody's trouble
    assert status == 200 and Told.closed == [9]
    assert (await site.post("/step", "b", action="8"))[0] == 404
    assert (await site.post("/step", "a", action="2"))[1]["done"]
    stats = await site.stats()
    assert (stats["games_in_step"], stats["incomplete_samples"]) == (1.0, 2.0)


async def test_a_game_that_is_finalized_is_incomplete_and_no_longer_running(site: Site) -> None:
    await site.post("/reset", "a", secret=5)
    await site.post("/step", "a", action="1")
    assert (await site.post("/finalize", "a"))[0] == 200
    await site.post("/reset", "b", secret=5)
    await site.post("/step", "b", action="1")
    await site.post("/step", "b", action="5")
    stats = await site.stats()
    assert (stats["total_samples"], stats["games_in_step"], stats["incomplete_samples"]) == (2.0, 1.0, 1.0)
    assert stats["mean_sum_reward"] == pytest.approx(0.9) and stats["mean_sum_reward_all"] == pytest.approx(0.4)
    await site.http.post("/stats/reset")
    after = await site.stats()
    assert (after["total_samples"], after["incomplete_samples"], after["total_games"]) == (0.0, 0.0, 1.0)


class Alone(Told):
    """Counts its calls that run at once, and waits in them until it is let go."""

    concurrent = True
    made: ClassVar[list[Alone]] = []
    at_once: ClassVar[list[int]] = []
    go: ClassVar[threading.Event] = threading.Event()

    def __init__(self, tries: int = 3) -> None:
        super().__init__(tries)
        self.made.append(self)
        self.running = 0

    def reset(self, secret: int = 5, **kwargs: Any) -> str:
        self.running += 1
        self.at_once.append(self.running)
        assert self.go.wait(WAIT_S)
        self.running -= 1
        return super().reset(secret, **kwargs)


async def test_concurrent_resets_of_a_game_count_as_one() -> None:
    for shared in (Alone.made, Alone.at_once):
        shared.clear()
    Alone.go.clear()
    routes = GameRoutes(Alone, None, {}, most_games=1)
    async with TestClient(TestServer(app_of(routes))) as http:
        site = Site(http, routes, [])
        both = [asyncio.ensure_future(site.post("/reset", "a")) for _ in range(2)]
        await until(lambda: len(Alone.at_once) == 1)
        assert (await site.post("/reset", "b"))[0] == 503  # the one that begins has the only place
        Alone.go.set()
        assert [status for status, _ in await asyncio.gather(*both)] == [200, 200]
        assert Alone.at_once == [1, 1] and len(Alone.made) == 1


async def test_numbers_are_kept_of_jobs_that_play_and_of_so_many(site: Site) -> None:
    async def kept() -> list[str]:
        return list((await (await site.http.get("/stats/jobs")).json())["jobs"])

    for path in ("/stats", "/stats/step", "/stats/cumulative"):
        response = await site.http.get(path, params={"job_id": "asked"})
        assert response.status == 200 and not any((await response.json()).values())
    assert (await site.http.delete("/stats/job/asked")).status == 200
    assert await kept() == []
    site.routes.stats.most = 2
    for job in ("first", "second", "first", "third"):
        await site.post("/reset", "a", job_id=job)
    assert await kept() == ["first", "third"]
    assert (await site.post("/step", "a", job_id="second", action="1"))[0] == 200  # the game goes on


async def test_a_game_is_made_and_asked_in_its_own_threads(site: Site) -> None:
    await site.post("/reset", "a")
    assert Told.threads and threading.get_ident() not in Told.threads


def test_numbers_of_games_are_those_of_their_rewards() -> None:
    stats = BaseGameStats()
    for name, rewards in {"a": [1.0, 3.0], "b": [2.0], "c": []}.items():
        stats.register_game_start(name)
        for reward in rewards:
            stats.record_step(name, reward)
        stats.record_game_result({}, 0.0, True, name)
    told = stats.get_step_stats() | stats.get_cumulative_stats()
    expected = {
        "mean_final_reward": 5 / 3,
        "mean_sum_reward": 2.0,
        "mean_sum_reward_all": 2.0,
        "mean_avg_reward": 4 / 3,
        "mean_reward": 2.0,
        "mean_game_steps": 1.0,
        "completion_rate": 1.0,
        "cumulative_mean_reward": 2.0,
        "cumulative_mean_steps": 1.0,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)
