"""The games that the published package ships: rewards, rows, images, programs, and what is refused."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp.test_utils import TestClient, TestServer

from opentinker.client.settings import Settings, spec_of
from opentinker.client.utils.utils import math_reward_function
from opentinker.environment import AbstractGameDataGenerator, DynamicGameDataset, GameEnvironment, create_game_server
from opentinker.environment.game_server import GameServerError, shard_of
from opentinker.environment.geo3k import Geo3KGameEnvironment, Geo3KToolEnvironment, Geo3KToolGame
from opentinker.environment.geo3k.geo3k_tool_game import boxed
from opentinker.environment.gomoku import GomokuGame, GomokuGameStats
from opentinker.environment.gym_environment_interaction import GymEnvironmentInteraction
from opentinker.environment.math import (
    CodeInterpreterMathGame,
    MathCodeInterpreterEnvironment,
    MathGame,
    MathGameEnvironment,
)
from opentinker.environment.prompts import messages_of
from opentinker.envs.base import Action
from opentinker.envs.builtin.gomoku_board import expert
from opentinker.envs.game import opening_of
from opentinker.envs.registry import make
from opentinker.envs.runtime.in_process_server import _playable
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import Image, Message, StopReason, Text
from tests.samples.published_games import HigherLower

PNG = b"\x89PNG\r\n\x1a\n...."
URL = "data:image/png;base64,iVBORw0KGgouLi4u"


def rows(path: Path, *given: dict[str, Any]) -> str:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in given))
    return str(path)


def problem(question: str, answer: str, **more: Any) -> dict[str, Any]:
    chat = [{"role": "user", "content": question}]
    return {"prompt": chat, "data_source": "m", "reward_model": {"ground_truth": answer}, **more}


async def opened(environment: Any, row: int = 0, **config: Any) -> tuple[Any, list[Message]]:
    """An episode as a job plays it."""
    kind: Any = _playable(environment.environment_class())
    playing = kind(kind.Config(**config))
    return playing, await playing.open(row, 7)


async def say(playing: Any, text: str) -> Any:
    return await playing.step(Action(text=text, stop=StopReason.EOS, turn=0))


# --- mathematics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "answer", "said", "reward"),
    [
        ("m", "\\frac{1}{2}", "It is \\boxed{0.5}.", 1.0),
        ("m", "2", "the answer is certainly not 2, it is \\boxed{3}", 0.0),
        ("m", "12", "123", 0.0),
        ("never heard of", "4", "\\boxed{4}", 1.0),
        ("openai/gsm8k", "72", "48+24=72\n#### 72", 1.0),
        ("openai/gsm8k", "72", "72 or\n#### 71", 0.0),
    ],
)
def test_an_answer_counts_by_its_value_alone(source: str, answer: str, said: str, reward: float) -> None:
    game = MathGame()
    game.reset(ground_truth=answer, data_source=source)
    result = game.step(said)
    assert (result.reward, result.done, result.info["exact"]) == (reward, True, reward)
    assert math_reward_function(source, said, answer) == reward


def test_a_problem_without_an_answer_is_no_problem() -> None:
    with pytest.raises(ValueError, match="ground_truth must be a text, not None; rows of a data set"):
        MathGame().reset()


async def test_rows_are_the_prompt_and_every_row_is_played_once_per_epoch(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", *(problem(f"{n}+1?", str(n + 1)) for n in range(5)))
    held = rows(tmp_path / "held.jsonl", *(problem(f"{n}*2?", str(2 * n)) for n in range(9)))
    env = MathGameEnvironment(MathGame, {"batch_size": 2, "val_batch_size": 4}, [train], [held], job_id="j")
    assert (len(env.train_dataloader), len(env.val_dataloader.dataset)) == (3, 4)
    seen = []
    for row in range(10):
        playing, (system, first) = await opened(env, row)
        assert system.role == "system" and "\\boxed" in system.text
        seen.append(first.text)
        assert (await say(playing, f"\\boxed{{{int(first.text[0]) + 1}}}")).reward == 1.0
    assert sorted(seen[:5]) == [f"{n}+1?" for n in range(5)] and seen[5:] == seen[:5]
    _, (_, first) = await opened(env, split="val")
    assert first.text.endswith("*2?")
    again = MathGameEnvironment(MathGame, {"batch_size": 2}, train)
    assert (await opened(again))[1][1].text == seen[0], "a program that is started again plays the same rows"


async def test_without_validation_data_there_are_no_evaluations(tmp_path: Path) -> None:
    env = MathGameEnvironment(MathGame, {}, rows(tmp_path / "a.jsonl", problem("1?", "1")), [None])
    assert env.get_dataloader()[1] is None
    options: dict[str, Any] = {"steps": 1, "save_freq": 1, "test_freq": 5, "first_too": True}
    settings = Settings({"tokenizer_path": "m", "adv_estimator": "grpo"})
    assert parse_spec(spec_of(settings, {"name": "served:x"}, **options, val_rows=None)).validation is None
    few = spec_of(Settings({"tokenizer_path": "m", "val_batch_size": 60}), {"name": "served:x"}, **options, val_rows=7)
    assert few["validation"]["episodes"] == 7
    with pytest.raises(ValueError, match="no rows to play for 'val'"):
        await opened(env, split="val")


async def test_programs_are_run_and_their_variables_stay(tmp_path: Path) -> None:
    data = rows(tmp_path / "a.jsonl", problem("What is 2**10?", "1024"))
    env = MathCodeInterpreterEnvironment(CodeInterpreterMathGame, {}, data, game_kwargs={"max_turns": 4})
    playing, (system, _) = await opened(env)
    assert "```python" in system.text
    step = await say(playing, "Let me see.\n```python\nx = 2**10\nprint('\\\\boxed{1}')\n```")
    assert (step.messages[0].text, step.reward, step.done) == ("```output\n\\boxed{1}\n```", 0.0, False)
    step = await say(playing, "```py\nx")
    assert step.messages[0].text == "```output\n1024\n```"
    step = await say(playing, "hm")
    assert step.messages[0].text.startswith("Write a program")
    step = await say(playing, "\\boxed{1024}")
    assert (step.reward, step.done, step.metrics["programs"], step.metrics["exact"]) == (1.0, True, 2.0, 1.0)
    await playing.close()


def test_a_program_that_never_ends_or_fails_is_an_observation_and_turns_are_counted() -> None:
    game, hurried = CodeInterpreterMathGame(max_turns=2), CodeInterpreterMathGame(max_turns=1, timeout=0.3)
    game.reset(ground_truth="1")
    assert "ZeroDivisionError" in game.step("```python\n1/0\n```").observation
    last = game.step("nothing")
    assert (last.reward, last.done, last.info["result"], last.info["failed_programs"]) == (0.0, True, "timeout", 1.0)
    hurried.reset(ground_truth="1")
    last = hurried.step("```python\nwhile True: pass\n```")
    assert (last.done, last.info["failed_programs"]) == (True, 1.0)
    for one in (game, hurried):
        one.close()
    with pytest.raises(ValueError, match=r"python tool: .*'monty' or 'sandbox'"):
        CodeInterpreterMathGame(backend="perl")  # type: ignore[arg-type]


# --- figures --------------------------------------------------------------------------------------------------------


async def test_images_stand_where_the_prompt_says(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(PNG)
    data = rows(
        tmp_path / "geo.jsonl",
        problem("See <image> and <image>: x?", "3", images=[URL, {"bytes": None, "path": "b.png"}]),
    )
    env = Geo3KGameEnvironment({}, [data], job_id="j")
    playing, (message,) = await opened(env)
    assert message.content == [Text("See "), Image(PNG), Text(" and "), Image(PNG), Text(": x?")]
    assert (await say(playing, "\\boxed{3}")).reward == 1.0


async def test_rows_that_show_nothing_are_played_as_text(tmp_path: Path) -> None:
    env = Geo3KGameEnvironment({}, rows(tmp_path / "a.jsonl", problem("x = 3. x?", "3", images=[])))
    env.setup(None)
    assert (await opened(env))[1] == [Message(role="user", content="x = 3. x?")]


@pytest.mark.parametrize(
    ("images", "said"),
    [(["text"], "line 1: images must hold PNG or JPEG"), ([URL, URL], "names 1 images, and the row has 2"),
     (["data:image/png;base64,?"], "not valid base64"), ([{"path": "not there"}], "No such file")],
)  # fmt: skip
async def test_images_that_are_none_are_named(tmp_path: Path, images: list[Any], said: str) -> None:
    env = Geo3KGameEnvironment({}, rows(tmp_path / "a.jsonl", problem("<image>?", "3", images=images)))
    with pytest.raises(RowError, match=said):
        await opened(env)


def test_parts_and_roles_of_a_prompt_are_kept() -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
    ]
    sample = {"raw_prompt": chat, "multi_modal_data": {"image": [Image(PNG)]}}
    assert messages_of(sample)[1].content == [Text("a"), Image(PNG), Text("b")]
    assert messages_of({"raw_prompt": [{"role": "user", "content": "<image>"}]})[0].content == "<image>"
    plain = {"raw_prompt": [{"role": "user", "content": "q"}], "multi_modal_data": {"image": [Image(PNG)]}}
    assert messages_of(plain)[0].content == [Image(PNG), Text("q")]
    with pytest.raises(RowError, match="names 1 images, and the row has 0"):
        messages_of({"raw_prompt": chat})


async def test_a_wrong_try_is_told_what_was_read_and_never_the_answer(tmp_path: Path) -> None:
    data = rows(tmp_path / "a.jsonl", problem("x?", "17"))
    playing, _ = await opened(Geo3KToolEnvironment({}, [data], max_retries=2))
    first = await say(playing, "\\boxed{\\frac{1}{2}}")
    assert (first.reward, first.done) == (0.0, False)
    assert "read as \\frac{1}{2}" in first.messages[0].text and "17" not in first.messages[0].text
    second = await say(playing, "no idea")
    assert (second.reward, second.done) == (-0.05, False) and "No answer" in second.messages[0].text
    last = await say(playing, "\\boxed{17}")
    assert (last.reward, last.done, last.metrics["tries"]) == (1.0, True, 3.0)
    assert boxed("\\boxed{a{b}c} \\boxed{{x}") is None and boxed("") is None
    game = Geo3KToolGame(0)
    game.reset(ground_truth="1")
    assert game.step("2").done


# --- gomoku ---------------------------------------------------------------------------------------------------------


def played(game: GomokuGame, *moves: str) -> list[tuple[float, bool, Any]]:
    results = [game.step(move) for move in moves]
    return [(result.reward, result.done, result.info.get("result")) for result in results]


def test_the_published_rewards_of_gomoku() -> None:
    game = GomokuGame(board_size=3, win_length=3, max_initial_moves=0, random_moves=0.0, max_total_steps=3)
    game.reset(seed=1)
    assert played(game, "nothing", "z9", "a1 b2 c3?? a9") == [
        (-1.0, False, None),
        (-1.0, False, None),
        (-20.0, True, "timeout"),
    ]

    class Priced(GomokuGame):
        REWARD_INVALID_FORMAT, REWARD_INVALID_POSITION, REWARD_INVALID_GAME_OVER = -2.0, -3.0, -9.0
        MAX_CONSECUTIVE_INVALID_MOVES = 3

    game = Priced()
    game.reset(seed=1)
    assert [reward for reward, _, _ in played(game, "nothing", "z9", "?")] == [-2.0, -3.0, -9.0]
    openings = {GomokuGame(empty_board_prob=1.0).reset(seed=seed) for seed in range(9)}
    assert len(openings) == 1 and "x" not in openings.pop()
    wins = losses = draws = 0
    for seed in range(30):
        game = GomokuGame(board_size=5, win_length=4, random_moves=0.9)
        game.reset(seed=seed)
        while True:
            best = game.board.name(expert(game.board)) if seed % 2 else game.board.name(game.board.free()[-1])
            result = game.step(f"I take a1, no, <move>{best.upper()}</move>")
            if result.done:
                break
            assert result.reward == 0.0
        assert result.reward == {"win": 10.0, "loss": -10.0, "draw": 0.0}[result.info["result"]]
        wins += result.info["result"] == "win"
        losses += result.info["result"] == "loss"
        draws += result.info["result"] == "draw"
    assert wins > 10 and wins + losses + draws == 30


def test_a_group_of_gomoku_meets_the_same_board_and_the_same_player() -> None:
    def story(seed: int) -> list[str]:
        game = GomokuGame()
        _, first = opening_of(game, {"seed": seed})
        return [first, *(game.step(move).observation for move in ("e5", "e6", "d4", "a1"))]

    random.seed(1)
    first = story(5)
    random.seed(2)
    assert story(5) == first
    assert len({story(seed)[0] for seed in range(12)}) > 4
    assert GomokuGame().generate_initial_state().keys() == {"seed"}


def test_gomoku_that_cannot_be_played_is_refused() -> None:
    with pytest.raises(ValueError, match="win_length = 5, board_size = 4"):
        GomokuGame(board_size=4)
    with pytest.raises(ValueError, match="max_total_steps must be at least 1"):
        GomokuGame(max_total_steps=0)


async def test_gomoku_is_played_by_env_workers_and_by_a_server_that_counts() -> None:
    environment: Any = make("opentinker.environment.gomoku:GomokuGame", {"board_size": 7}, modules=True)
    system, _ = await environment.open(0, 0)
    assert "board of 7 by 7" in system.text
    server = TestServer(create_game_server(GomokuGame, GomokuGameStats, board_size=3, win_length=3, max_total_steps=1))
    async with TestClient(server) as http:
        ids = {"instance_id": "i", "job_id": "j"}
        await http.post("/reset", json={**ids, "seed": 3})
        step = await (await http.post("/step", json={**ids, "action": "none"})).json()
        assert (step["reward"], step["done"], step["info"]["result"]) == (-20.0, True, "timeout")
        stats = await (await http.get("/stats", params={"job_id": "j"})).json()
        assert (stats["timeout_rate"], stats["win_rate"], stats["mean_sum_reward"]) == (1.0, 0.0, -20.0)
        assert (stats["mean_reward"], stats["mean_avg_reward"], stats["mean_sum_reward_all"]) == (-20.0,) * 3


# --- environments of one's own --------------------------------------------------------------------------------------


class Riddles(AbstractGameDataGenerator):
    """Draws differently every time it is asked."""

    def generate_sample(self, index: int) -> dict[str, Any]:
        secret = random.SystemRandom().randint(1, 10**9)
        return {"prompt": [{"role": "user", "content": f"riddle {secret}"}], "env_kwargs": {"secret": secret}}


async def test_words_of_a_generator_of_one_s_own_are_the_prompt_and_siblings_get_the_same() -> None:
    class Own(GameEnvironment):
        def _setup_dataloader(self) -> None:
            self.train_dataloader = SimpleNamespace(dataset=DynamicGameDataset(Riddles()))
            self.val_dataloader = None

    env = Own(HigherLower, {"interaction": {"config": {"observation_template": "[{observation}]"}}})
    playing, (message,) = await opened(env, 3)
    assert message.text == f"riddle {playing._game.secret}"
    assert (await opened(env, 3))[1] == [message] and (await opened(env, 4))[1] != [message]
    assert (await say(playing, "0")).messages[0].text.startswith("[higher (")


def test_settings_of_an_interaction_are_used_or_refused() -> None:
    def env(**config: Any) -> GameEnvironment:
        return GameEnvironment(HigherLower, {"interaction": {"config": config}})

    for config, said in (
        ({"observation_template": "text"}, "must hold {observation}"),
        ({"env_shards": 0}, "env_shards = 0"),
        ({"bind_worker_to_endpoint": True}, "no game server to bind to"),
        ({"env_endpoint": "http://h", "env_shards": 2}, "must name the port"),
    ):
        with pytest.raises(ValueError, match=said):
            env(**config)
    with pytest.raises(GameServerError, match=r"no game server at http://127\.0\.0\.1:9"):
        env(env_endpoint="http://127.0.0.1:9").setup(None)
    assert shard_of("http://me:secret@[::1]:80/x", 1) == "http://me:secret@[::1]:81/x"
    assert shard_of("http://h:80/x", 2) == "http://h:82/x" and shard_of("http://h", 0) == "http://h"
    with pytest.raises(ValueError, match="must name the port"):
        shard_of("http://h", 1)


async def test_an_interaction_plays_here_or_on_a_server() -> None:
    server = TestServer(create_game_server(HigherLower))
    async with TestClient(server):
        endpoint = str(server.make_url("/"))
        await asyncio.to_thread(GameEnvironment(HigherLower, {"env_endpoint": endpoint}).setup, None)
        for config in ({"env_endpoint": endpoint}, {"env_factory": HigherLower}):
            playing = GymEnvironmentInteraction({**config, "observation_template": "<{observation}>"})
            id = await playing.start_interaction(secret=4)
            done, text, reward, info = await playing.generate_response(id, [{"role": "assistant", "content": "1"}])
            assert (done, text[:7], reward, info["result"]) == (False, "<higher", -0.1, "loss")
            done, _, _, _ = await playing.generate_response(id, [{"role": "assistant", "content": "4"}])
            assert done and await playing.calculate_score(id) == pytest.approx(0.9)
            await playing.finalize_interaction(id)
            with pytest.raises(KeyError, match="start_interaction"):
                await playing.calculate_score(id)
    with pytest.raises(ValueError, match="one of them"):
        GymEnvironmentInteraction({})


def test_rows_for_those_who_look_at_tokens() -> None:
    class Words:
        pad_token_id = 0

        def apply_chat_template(self, chat: Any, **_: Any) -> list[int]:
            return [ord(c) for c in chat[0]["content"]]

    rows = DynamicGameDataset(Riddles(), Words(), {"max_prompt_tokens": 20}, virtual_size=2)
    row = rows[0]
    text = row["raw_prompt"][0]["content"]
    assert row["input_ids"] == [0] * (20 - len(text)) + [ord(c) for c in text]
    assert sum(row["attention_mask"]) == len(text) == row["position_ids"][-1] + 1
    with pytest.raises(ValueError, match="max_prompt_tokens is 5"):
        DynamicGameDataset(Riddles(), None, {"max_prompt_tokens": 5}, SimpleNamespace(tokenizer=Words()))[0]
