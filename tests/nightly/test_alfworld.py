"""ALFWorld: real games of every split, won by the expert; seeds, rewards, what is said of a wrong path."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from opentinker.environment.alfworld import ALFWorldGame
from opentinker.envs.adapters import library
from opentinker.envs.base import play_gold
from opentinker.envs.builtin.alfworld_games import TASKS, NoGames, Split, choose, listing, read
from opentinker.envs.builtin.alfworld_play import TextWorldGame, command_of
from opentinker.envs.game import StepResult, opening_of
from opentinker.envs.registry import check, find, make
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.errors import SpecError
from tests.support.cluster import ROOT
from tests.support.playing import Table, opening, sit, step

pytestmark = pytest.mark.skipif(find_spec("alfworld") is None, reason="alfworld is not installed: make games")
GAMES = ROOT / "examples" / "data" / "alfworld"
PATH = str(GAMES)
SHIPPED = {"train": 4, "valid_seen": 1, "valid_unseen": 1}


def wrong(**config: Any) -> str:
    with pytest.raises(SpecError) as caught:
        check("alfworld", {"path": PATH, **config})
    return " ".join(f"{mistake['field']}: {mistake['problem']}" for mistake in caught.value.mistakes)


# --- which games there are: no library ------------------------------------------------------------------------------


def played(rows: range, seed: int = 0, split: str = "train", *tasks: str, shuffle: bool = True) -> list[str]:
    return [choose(PATH, split, tasks, row=row, seed=seed, shuffle=shuffle)[1] for row in rows]


@pytest.mark.parametrize(("split", "number"), SHIPPED.items())
def test_every_split_has_its_games(split: str, number: int) -> None:
    games = listing(PATH, split)
    assert len(games) == number
    assert all(file.parts[-4] == split and task in TASKS and read(file).solvable for file, task in games)


def test_a_pass_has_every_game_once_in_an_order_by_seed() -> None:
    first, second = played(range(4)), played(range(4, 8))
    assert sorted(first) == sorted(second) == sorted(str(file) for file, _ in listing(PATH, "train"))
    orders = {tuple(played(range(4), seed)) for seed in range(6)}
    assert len(orders) > 2
    assert first == played(range(4)) != played(range(4), shuffle=False) == sorted(first)


def test_choosing_leaves_the_global_random_numbers_alone() -> None:
    random.seed(5)
    before = random.getstate()
    played(range(8), 3)
    assert random.getstate() == before


def test_tasks_are_honoured() -> None:
    wanted = "pick_two_obj_and_place"
    assert {Path(file).parts[-3].partition("-")[0] for file in played(range(8), 0, "train", wanted)} == {wanted}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A copy of the training games, in a directory as ALFWorld's downloads have it."""
    shutil.copytree(GAMES / "train", tmp_path / "json_2.1.1" / "train")
    yield tmp_path


def test_a_download_of_alfworld_is_found_by_its_directory(own: Path) -> None:
    assert len(listing(str(own), "train")) == 4


def test_a_game_without_solution_leaves_its_row_to_the_next(own: Path) -> None:
    first, second = (file for file, _ in listing(str(own), "train")[:2])
    game = read(first)
    game.solvable = False
    first.write_bytes(msgspec.json.encode(game))
    assert choose(str(own), "train", (), row=0, seed=0, shuffle=False)[1] == str(second)
    for file, _ in listing(str(own), "train"):
        file.write_bytes(msgspec.json.encode(game))
    with pytest.raises(NoGames, match=r"no game of .* is marked as solvable"):
        choose(str(own), "train", (), row=0, seed=0, shuffle=False)


def test_what_alfworld_leaves_out_is_left_out(own: Path) -> None:
    train = own / "json_2.1.1" / "train"
    (game,) = train.glob("look_at_obj_in_light-*")
    game.rename(train / "look_at_obj_in_light-PillowSliced-None-DeskLamp-316")
    (train / "notes.txt").write_text("no game")
    assert len(listing(str(own), "train")) == 3


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go to desk 1", "go to desk 1"),
        ("I look around first.\n\nGo to  Desk 1.\n", "go to desk 1"),
        ("Action: look\nno:\nACTION: `go to desk 1`", "go to desk 1"),
        ("Action:\ngo to desk 1", "go to desk 1"),
        ("<thinking>action: look</thinking>\n<action>go to desk 1</action> as said", "go to desk 1"),
        ("<action>\ngo to desk 1\n", "go to desk 1"),
        ("put mug 2 in/on desk 1", "move mug 2 to desk 1"),
        ("> put mug 2 on desk 1", "move mug 2 to desk 1"),
        ("dance", "dance"),
        (" \n", ""),
    ],
)
def test_what_the_policy_wants_to_do(text: str, command: str) -> None:
    assert command_of(text, ["go to desk 1", "move mug 2 to desk 1", "look"]) == command


# --- settings -------------------------------------------------------------------------------------------------------


def test_wrong_settings_say_what_there_is(tmp_path: Path) -> None:
    assert "is not a directory on this machine" in wrong(path=str(tmp_path / "none"))
    assert "there are: none" in wrong(path=str(tmp_path))
    assert "environment.config.split" in wrong(split="test")
    assert "there are: train, valid_seen, valid_unseen" in wrong(split="valid_train")
    assert "environment.config.tasks.0" in wrong(tasks=["pick_and_place"])
    assert "has no game of pick_heat_then_place_in_recep" in wrong(tasks=["pick_heat_then_place_in_recep"])
    assert "AlfWorld knows: commands," in wrong(max_turns=3)
    assert all(f"environment.config.{name}" in wrong(**{name: 0}) for name in ("max_steps", "win"))
    assert "environment.config.invalid_penalty" in wrong(invalid_penalty=-0.1)
    (tmp_path / "train" / "look_at_obj_in_light-A" / "t").mkdir(parents=True)
    (tmp_path / "train" / "look_at_obj_in_light-A" / "t" / "game.tw-pddl").write_text("{}")
    assert "cannot be read as a game of ALFWorld" in wrong(path=str(tmp_path))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda module: False)
    assert "pip install 'opentinker[alfworld]'" in wrong()
    check("alfworld", {"path": "elsewhere"}, elsewhere=True)


def test_the_kinds_of_task_are_the_librarys() -> None:
    from alfworld.agents.environment.alfred_tw_env import TASK_TYPES

    assert tuple(TASK_TYPES.values()) == TASKS


def test_it_runs_in_processes_that_are_replaced() -> None:
    found = find("alfworld")
    assert found.blocking and found.cost > 1.0 and found.recycle_after and found.memory_mb


# --- played ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SHIPPED)
async def test_the_expert_wins_real_games(split: str) -> None:
    arguments = list(sys.argv)
    environment = make("alfworld", {"path": PATH, "split": split})
    episode = await play_gold(environment, 0, 0)
    assert (episode.reward, episode.metrics["exact"], episode.metrics["invalid"]) == (1.0, 1.0, 0.0)
    assert episode.turns == episode.metrics["steps"] <= 10
    assert sum(name.startswith("task/") for name in episode.metrics) == 1
    assert "Your task is to" in episode.messages[0].text and "Possible: " in episode.messages[2].text
    assert sys.argv == arguments


async def finish(table: Table) -> None:
    """By the expert, from wherever it is."""
    while not (await table.say(table.environment.gold())).done:
        pass


PLACE = {"path": PATH, "tasks": ["pick_and_place_simple"]}


async def test_rewards_are_as_they_are_set() -> None:
    prices = {"win": 10.0, "lose_penalty": 1.0, "step_penalty": 0.01, "invalid_penalty": 0.1}
    table = await sit("alfworld", **PLACE, **prices, commands=False, instruction="")
    assert table.prompt.startswith("You are in the middle of a room.") and "Possible" not in table.prompt
    invalid = await table.say("dance")
    assert table.seen == "Nothing happens."
    assert invalid.components == {"outcome": 0.0, "step": -0.01, "invalid": -0.1}
    assert (await table.say("Action: Look.")).components == {"outcome": 0.0, "step": -0.01, "invalid": 0.0}
    await finish(table)
    won = table.steps[-1]
    assert won.components["outcome"] == 10.0 and won.messages == []
    assert (won.metrics["exact"], won.metrics["invalid"], won.metrics["steps"]) == (1.0, 1.0, len(table.steps))
    await table.environment.close()

    table = await sit("alfworld", **PLACE, **prices, max_steps=2)
    lost = await table.say("look", "look")
    assert lost.done and lost.components["outcome"] == -1.0 and lost.metrics["exact"] == 0.0
    await table.environment.close()


async def test_the_expert_finds_back_from_where_somebody_else_went() -> None:
    table = await sit("alfworld", **PLACE)
    place = next(command for command in table.environment._play.commands if command.startswith("go to sofa"))
    await table.say("look", place, "look")
    await finish(table)
    assert table.steps[-1].metrics["exact"] == 1.0
    await table.environment.close()


@pytest.mark.slow
async def test_the_same_seed_begins_alike_and_goes_on_alike() -> None:
    async def story(seed: int, **config: Any) -> list[str]:
        table = await sit("alfworld", 0, seed, path=PATH, split="valid_seen", **config)
        texts = [table.prompt]
        for said in ("look", "inventory", "dance"):
            await table.say(said)
            texts.append(table.seen)
        await table.environment.close()
        return texts

    assert await story(1) == await story(1) == await story(2)
    shuffled = [await story(seed, shuffle_names=True) for seed in range(3)]
    assert await story(2, shuffle_names=True) == shuffled[2]
    assert len({texts[0] for texts in shuffled}) > 1


@pytest.mark.slow
async def test_two_games_in_one_process_do_not_disturb_each_other() -> None:
    tables = [await sit("alfworld", row, path=PATH, shuffle=False) for row in range(2)]
    over: set[int] = set()
    while len(over) < 2:
        for place, table in enumerate(tables):
            if place not in over and (await table.say(table.environment.gold())).done:
                over.add(place)
                await table.environment.close()
    assert [table.steps[-1].metrics["exact"] for table in tables] == [1.0, 1.0]


@pytest.mark.slow
async def test_the_planner_wins_every_shipped_game_whatever_its_things_are_called() -> None:
    for split in SHIPPED:
        for file, _ in listing(PATH, split):
            play = TextWorldGame(read(file), shuffle_names=True, seed=3)
            for _ in range(20):
                if (seen := play.say(play.expert())).won:
                    break
                assert seen.valid
            play.close()
            assert seen.won, file


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def threads_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


@pytest.mark.slow
async def test_eight_processes_win_side_by_side() -> None:
    """Each in one thread; what the expert says is known beforehand, as a policy would know it."""
    host = ChildPool(children=8, per_child=1, modules=False)
    sessions = Sessions("w", limit=64, resolver=Resolver(modules=False), host=host)
    before = children_of(os.getpid())
    threads: list[int] = []

    async def play(row: int) -> float:
        asked = opening("alfworld", f"s{row}", row=row, deadline_s=500.0, path=PATH, shuffle=False)
        reply = await sessions.open(asked)
        for turn, command in enumerate(read(listing(PATH, "train")[row % 4][0]).walkthrough):
            assert reply.failure is None, reply.error
            if turn == 1:
                threads[:] = [threads_of(child) for child in children_of(os.getpid()) if child not in before]
            reply = await sessions.step(step(turn, command, f"s{row}"))
        return reply.metrics["exact"] if reply.done else 0.0

    try:
        assert await asyncio.gather(*map(play, range(8))) == [1.0] * 8
        assert threads == [1] * 8
    finally:
        await host.close()


# --- by its published name ------------------------------------------------------------------------------------------


@pytest.fixture
def data(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(own))


@pytest.mark.usefixtures("data")
def test_the_published_game_is_won_for_its_rewards() -> None:
    game = ALFWorldGame(task_types=["pick_and_place_simple"], max_steps=9)
    state = game.generate_initial_state()
    system, first = opening_of(game, state)
    assert system is not None and "<action>" in system and "Your task is to: put a book in sofa." in first
    assert game.step("<action>dance</action>").reward == ALFWorldGame.REWARD_INVALID_ACTION == -0.1
    results: list[StepResult] = []
    while not results or not results[-1].done:
        results.append(game.step(f"I think so.\n<action>{game.expert_action()}</action>"))
    assert {result.reward for result in results[:-1]} == {ALFWorldGame.REWARD_STEP} == {-0.01}
    assert (results[-1].reward, results[-1].info["result"]) == (10.0, "win")
    assert game.step("look").done
    game.reset(**state)
    assert [game.step("look").reward for _ in range(9)] == [-0.01] * 8 + [ALFWorldGame.REWARD_FAILURE]
    game.close()


@pytest.mark.usefixtures("data")
def test_the_published_game_chooses_by_seed_and_task_alone() -> None:
    game, before = ALFWorldGame(), random.getstate()
    first, second = ([game.choose(None, seed).pddl_problem for seed in range(20)] for _ in range(2))
    assert first == second and len(set(first)) == 4
    assert {game.choose("look_at_obj_in_light", seed).walkthrough[-1] for seed in range(5)} == {"use desklamp 1"}
    assert len({ALFWorldGame(num_games=1).choose(None, seed).pddl_problem for seed in range(9)}) == 1
    assert random.getstate() == before


@pytest.mark.usefixtures("data")
def test_seeds_number_the_games_of_a_split() -> None:
    game = ALFWorldGame()
    paths = game._get_cached_game_paths()
    for seed in range(20):
        number = random.Random(seed).randrange(len(paths))
        task = Path(paths[number]).parent.name.split("-")[0]
        assert game.choose(task, seed) == game.choose(None, seed) == read(Path(paths[number], "game.tw-pddl"))
        assert game.reset(seed=seed)
        info = game.step("<action>look</action>").info
        assert (info["success"], info["action_taken"]) == (False, "look") and info["task"].startswith("Your task is to")
    game.close()


@pytest.mark.usefixtures("data")
def test_the_published_game_refuses_what_it_cannot_play(tmp_path: Path) -> None:
    for arguments, why in (
        ({"split": "test"}, "there are train, eval_in_distribution"),
        ({"task_types": ["cook"]}, "task_types: cook"),
        ({"num_games": 0}, "num_games"),
        ({"use_shared_env": True}, "use_shared_env"),
        ({"config_path": str(tmp_path / "none.yaml")}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=why):
            ALFWorldGame(**arguments)
    with pytest.raises(NoGames, match="has no split 'valid_seen'"):
        ALFWorldGame(split="eval_in_distribution").reset()


def test_the_published_game_reads_alfworlds_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", PATH)
    file = tmp_path / "base_config.yaml"
    file.write_text("env: {task_types: [2]}\ndataset: {eval_ood_data_path: $ALFWORLD_DATA/train}\n")
    game = ALFWorldGame(config_path=str(file), split="eval_out_of_distribution")
    assert game.task_types == ["look_at_obj_in_light"]
    assert "look at pillow under the desklamp" in game.reset()
    game.close()


def test_splits_are_those_of_the_release() -> None:
    assert set(SHIPPED) < set(get_args(Split))
