"""The published game servers: constructor arguments of their games, retries, programs on a sandbox server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from opentinker.environment.base_game_server import create_game_app
from opentinker.environment.game_server import GameServerError
from opentinker.environment.geo3k import Geo3KGame, Geo3KToolGame
from opentinker.environment.gomoku import GomokuGame
from opentinker.environment.math import CodeInterpreterMathGame, MathGame
from opentinker.server.sandbox import create_sandbox_app


def test_a_response_without_an_answer_is_asked_again_as_often_as_said() -> None:
    class Strict(MathGame):
        REWARD_FORMAT_ERROR = -0.5

    game = Strict(max_retries=1)
    game.reset(ground_truth="4")
    first, second = game.step("I do not know."), game.step("Nor now.")
    assert (first.reward, first.done, second.reward, second.done) == (-0.5, False, -0.5, True)
    assert "\\boxed" in first.observation and "result" not in first.info and second.info["result"] == "loss"
    game = Strict(answer_pattern=r"<answer>(.*?)</answer>")
    for said, reward in (
        ("\\boxed{4}", -0.5),
        ("<answer>3</answer> <answer>4</answer>", 1.0),
        ("<answer>5</answer>", 0.0),
    ):
        game.reset(ground_truth="4")
        assert game.step(said).reward == reward
    with pytest.raises(ValueError, match="answer_pattern"):
        MathGame(answer_pattern="(")


async def test_programs_run_on_a_sandbox_server() -> None:
    server = TestServer(create_sandbox_app())
    async with TestClient(server) as http:
        assert (await http.post("/run_code", json={"code": 3})).status == 422
        game = CodeInterpreterMathGame(sandbox_url=str(server.make_url("/run_code")), max_turns=0)
        game.reset(ground_truth="42")
        seen = await asyncio.to_thread(game.step, "```python\nprint(6 * 7)\n```")
        assert (seen.observation, seen.done) == ("```output\n42\n```", False)
        seen = await asyncio.to_thread(game.step, "```python\n1/0\n```")
        assert "ZeroDivisionError" in seen.observation and seen.info["failed_programs"] == 1.0
        game.close()
    with pytest.raises(GameServerError, match="/run_code"):
        await asyncio.to_thread(game.step, "```python\n1\n```")
    with pytest.raises(ValueError, match="must be a URL"):
        CodeInterpreterMathGame(sandbox_url="localhost:8000")


@pytest.mark.parametrize(
    ("game", "arguments"),
    [
        (MathGame, {"max_retries": 0}),
        (CodeInterpreterMathGame, {"sandbox_url": "http://127.0.0.1:9/run_code", "max_turns": 10, "timeout": 30}),
        (Geo3KGame, {"max_retries": 0}),
        (Geo3KToolGame, {"max_retries": 3}),
        (GomokuGame, {"board_size": 9, "max_total_steps": 40, "max_initial_moves": 6, "empty_board_prob": 0.2}),
    ],
)
def test_arguments_that_the_published_servers_pass_are_taken(game: type[Any], arguments: dict[str, Any]) -> None:
    assert create_game_app(game_class=game, stats_class=None, **arguments)
