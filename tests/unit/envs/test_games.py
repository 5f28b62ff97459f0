"""Games of the published interface, played as environments: seeds, prompts, isolation of random numbers, mistakes."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from opentinker.environment import (
    AbstractGame,
    GameDataGenerator,
    GameEnvironment,
    GameStats,
    StepResult,
    create_game_server,
)
from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.envs.base import Action, Environment, Step
from opentinker.envs.game import is_concurrent, numbers_of
from opentinker.envs.registry import check, find, make
from opentinker.envs.runtime.in_process_server import _playable
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.errors import SpecError
from tests.conftest import WAIT_S
from tests.samples.published_games import HigherLower

GAME, WORDED, CARELESS = (f"tests.samples.published_games:{name}" for name in ("HigherLower", "Worded", "Careless"))


async def opened(environment: Environment, row: int, seed: int) -> list[Message]:
    messages = await environment.open(row, seed)
    assert isinstance(messages, list)
    return messages


async def say(environment: Environment, text: str, turn: int = 0) -> Step:
    return await environment.step(Action(text=text, stop=StopReason.EOS, turn=turn))


async def test_the_instance_that_plays_says_the_prompt() -> None:
    environment: Any = make(GAME, {"largest": 20}, modules=True)
    assert environment.blocking
    system, first = await opened(environment, 0, 1)
    assert (system.role, system.text) == ("system", "You guess numbers.")
    dice, initial = first.text.splitlines()[-1], first.text.splitlines()[0]
    assert initial == "Guess my number, 1 to 20." and dice.startswith("Dice: ")
    won = await say(environment, str(environment._game.secret))
    assert (won.reward, won.done, won.metrics) == (1.0, True, {"tries": 1.0})


async def test_siblings_begin_with_the_same_state_and_go_on_alike() -> None:
    async def story(row: int, seed: int) -> list[str]:
        environment = make(GAME, {}, modules=True)
        messages = await opened(environment, row, seed)
        steps = [await say(environment, "0", turn) for turn in range(2)]
        return [m.text for m in messages] + [step.messages[0].text for step in steps]

    assert await story(3, 4) == await story(3, 4)
    assert len({tuple(await story(row, 4)) for row in range(8)}) > 4


async def test_games_in_one_process_do_not_disturb_each_other_s_random_numbers() -> None:
    alone = make(GAME, {}, modules=True)
    await opened(alone, 0, 7)
    expected = (await say(alone, "0")).messages[0].text
    random.seed(5)
    outside = random.random()
    random.seed(5)
    one, other = make(GAME, {}, modules=True), make(GAME, {}, modules=True)
    await opened(one, 0, 7)
    await opened(other, 1, 8)
    await say(other, "0")
    assert (await say(one, "0")).messages[0].text == expected
    assert random.random() == outside


class Meeting(HigherLower):
    """Its step waits until two of them are there."""

    concurrent = True
    met = threading.Barrier(2)

    def step(self, action: str) -> StepResult:
        self.met.wait(WAIT_S)
        return StepResult("", 1.0, True)


class Heir(Meeting):
    def step(self, action: str) -> StepResult:
        return super().step(action)


async def test_calls_of_games_that_share_nothing_are_made_at_once() -> None:
    kind: Any = _playable(Meeting)
    one, other = kind(kind.Config()), kind(kind.Config())
    for row, playing in enumerate((one, other)):
        await opened(playing, row, 0)
    assert [step.reward for step in await asyncio.gather(say(one, "1"), say(other, "1"))] == [1.0, 1.0]
    assert is_concurrent(Meeting) and not is_concurrent(Heir) and not is_concurrent(HigherLower)
    async with TestClient(TestServer(create_game_server(Meeting))) as http:

        async def step(instance: str) -> float:
            ids = {"instance_id": instance, "job_id": "j"}
            await http.post("/reset", json=ids)
            answer = await (await http.post("/step", json={**ids, "action": "1"})).json()
            return float(answer["reward"])

        assert sum(await asyncio.gather(step("a"), step("b"))) == 2.0


async def test_a_game_that_words_its_state_itself_plays_the_state_that_it_showed() -> None:
    environment: Any = make(WORDED, {}, modules=True)
    (first,) = await opened(environment, 2, 3)
    again: Any = make(GAME, {}, modules=True)
    (_, plain) = await opened(again, 2, 3)
    assert first.role == "user"
    assert first.text.splitlines()[-1] == f"[{plain.text.splitlines()[-1]}]"
    assert environment._game.secret == again._game.secret


async def test_the_prompt_shows_the_state_that_is_played_also_where_numpy_draws_it() -> None:
    environment: Any = make("tests.samples.published_games:Rolled", {}, modules=True)
    (_, first) = await opened(environment, 2, 3)
    assert first.text == str(environment._game.secret)


def test_arguments_that_the_game_does_not_take_or_needs_are_named() -> None:
    with pytest.raises(SpecError, match="HigherLower takes no bigest; it takes: largest, tries"):
        check(GAME, {"bigest": 3}, modules=True)

    class Needy(HigherLower):
        def __init__(self, topic: str, **more: Any) -> None:
            super().__init__()

    with pytest.raises(ValueError, match="Needy needs topic"):
        GameEnvironment(Needy, {}, {"other": 1})


async def test_what_a_game_tells_beside_its_reward_fails_no_episode() -> None:
    info = {"ratio": float("nan"), "best": np.float32("inf"), "huge": 10**400, "tries": 2, "won": np.bool_(True)}
    with pytest.warns(UserWarning, match="not a finite number") as warned:
        assert numbers_of(info) == {"tries": 2.0, "won": 1.0}
    assert [str(w.message).split(" is ")[0] for w in warned] == ["info['ratio']", "info['best']", "info['huge']"]


@pytest.mark.parametrize("name", ["truncated", "TimeLimit.truncated"])
async def test_a_game_that_a_limit_ended_says_so_in_its_info(name: str) -> None:
    environment: Any = make(GAME, {"tries": 1}, modules=True)
    await opened(environment, 0, 0)
    lost = await say(environment, "0")
    assert (lost.done, lost.truncated, lost.messages) == (True, False, [])
    environment._game.step = lambda action: StepResult("still open", 0.0, True, {name: True})
    left = await say(environment, "0", 1)
    assert (left.done, left.truncated, left.messages[0].text) == (True, True, "still open")


async def test_a_step_that_is_no_step_result_says_so() -> None:
    environment = make(CARELESS, {}, modules=True)
    await opened(environment, 0, 0)
    with pytest.raises(TypeError, match=r"Careless\.step must return a StepResult, not tuple"):
        await say(environment, "1")


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(SpecError, match="nor of AbstractGame"):
        find("tests.samples.published_games:StepResult", modules=True)


def test_published_defaults_and_positional_use() -> None:
    class Least(AbstractGame):
        def reset(self, **kwargs: Any) -> str:
            return "start"

        def step(self, action: str) -> StepResult:
            return StepResult("next", 0.5, True)

        def get_system_prompt(self) -> str:
            return "s"

        def get_initial_user_message(self) -> str:
            return "u"

    game = Least()
    assert game.step("x") == StepResult(observation="next", reward=0.5, done=True, info={})
    assert (game.generate_initial_state(), game.get_state(), game.parse_action("a")) == ({}, {}, "a")
    assert game.get_interaction_name() == "least" and Least.agent_loop_name == "generic_agent"
    assert game.get_user_message_with_state() == "u\n\nstart"
    sample = GameDataGenerator(Least, seed=1).generate_sample(0)
    assert sample["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u\n\nstart"}]
    assert (sample["env_kwargs"], sample["data_source"]) == ({}, "least")


# --- the game server of the published make ----------------------------------------------------------------------------


async def test_a_game_server_plays_counts_and_forgets() -> None:
    server = TestServer(create_game_server(HigherLower, GameStats, largest=3))
    async with TestClient(server) as http:

        async def post(path: str, **body: Any) -> tuple[int, Any]:
            response = await http.post(path, json={"instance_id": "i", "job_id": "j", **body})
            return response.status, await (response.json() if response.status == 200 else response.text())

        status, first = await post("/reset", secret=2)
        assert status == 200 and first["system_prompt"] == "You guess numbers."
        assert first["observation"].startswith("Guess my number, 1 to 3.\n\nDice: ")
        assert (await post("/step", action="1"))[1]["reward"] == -0.1
        _, won = await post("/step", action="2")
        assert (won["reward"], won["done"], won["info"]["result"]) == (1.0, True, "win")
        assert (await post("/step", action="2"))[0] == 404
        assert (await post("/reset", instance_id=3))[0] == 422
        stats = await (await http.get("/stats", params={"job_id": "j"})).json()
        assert (stats["total_games"], stats["win_rate"], stats["mean_game_steps"]) == (1.0, 1.0, 2.0)
        assert stats["mean_sum_reward"] == pytest.approx(0.9)
        client = GameStatsClient(str(server.make_url("/")), job_id="j")
        assert await asyncio.to_thread(client.health_check)
        assert (await asyncio.to_thread(client.reset_step) or {})["games_in_step"] == 1.0
        assert (await asyncio.to_thread(client.get_step_stats) or {})["games_in_step"] == 0.0
        assert await asyncio.to_thread(client.list_jobs) == ["j"]


def test_statistics_of_a_server_that_is_away_are_none() -> None:
    client = GameStatsClient("http://127.0.0.1:9", timeout=0.5)
    assert (client.health_check(), client.get_all_stats(), client.list_jobs()) == (False, None, [])


async def test_an_environment_with_a_game_server_plays_there_from_start_states_drawn_here() -> None:
    server = TestServer(create_game_server(HigherLower, tries=2))
    async with TestClient(server):
        config = {"interaction": {"config": {"env_endpoint": str(server.make_url("/"))}}}
        kind: Any = _playable(GameEnvironment(HigherLower, config, job_id="j").environment_class())
        environment: Any = kind(kind.Config())
        system, first = await opened(environment, 4, 5)
        local: Any = make(GAME, {}, modules=True)
        await opened(local, 4, 5)
        assert system.text == "You guess numbers." and first.text.startswith("Guess my number")
        won = await say(environment, str(local._game.secret))
        assert (won.reward, won.done) == (1.0, True)
        await environment.close()
