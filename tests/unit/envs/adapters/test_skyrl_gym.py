"""Real skyrl-gym environments, unmodified, on rows of the tests."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.envs.registry import check, rehearse
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.types.errors import SpecError
from tests.support.playing import Table, sit

GSM8K = [
    {"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "reward_spec": {"ground_truth": str(n + 2)}}
    for n in range(3)
]
AIME = [{"prompt": "How much is 6 times 7?", "reward_model": {"ground_truth": "42"}}]


def config(tmp_path: Path, id: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    path = tmp_path / f"{id}.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return {"id": id, "path": str(path), "shuffle": False, **settings}


async def play(tmp_path: Path, id: str, rows: list[dict[str, Any]], row: int = 0, **settings: Any) -> Table:
    return await sit("skyrl_gym", row, **config(tmp_path, id, rows, **settings))


async def test_gsm8k_is_scored_by_its_own_rule(tmp_path: Path) -> None:
    for row in range(3):
        table = await play(tmp_path, "gsm8k", GSM8K, row)
        assert table.prompt == f"What is {row} + 2?"
        step = await table.say(f"It is\n#### {row + 2}")
        assert (step.done, step.reward) == (True, 1.0)
    assert (await (await play(tmp_path, "gsm8k", GSM8K)).say("#### 7")).reward == 0.0


async def test_an_episode_has_the_category_of_its_row(tmp_path: Path) -> None:
    rows = [{**row, "level": "easy"} for row in GSM8K]
    assert "task/easy" in (await (await play(tmp_path, "gsm8k", rows, category="level")).say("#### 2")).metrics


async def test_gsm8k_in_several_turns_answers_in_between(tmp_path: Path) -> None:
    table = await play(tmp_path, "gsm8k_multi_turn", [row | {"max_turns": 3} for row in GSM8K])
    step = await table.say("let me think")
    assert not step.done and step.messages and step.messages[0].role == "user"
    assert not (await table.say("still thinking")).done
    step = await table.say("#### 2")
    assert step.done and step.reward == 1.0


async def test_aime_pays_and_fines(tmp_path: Path) -> None:
    assert (await (await play(tmp_path, "aime", AIME)).say("Answer: \\boxed{42}")).reward == 1.0
    assert (await (await play(tmp_path, "aime", AIME)).say("Answer: \\boxed{41}")).reward == -1.0


async def test_sql_is_asked_in_turns(tmp_path: Path) -> None:
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as shop:
        shop.execute("create table fruit (name text, price int)")
        shop.execute("insert into fruit values ('pear', 3), ('plum', 2)")
    gold = "select name from fruit where price = 3"
    row = {"prompt": "Which fruit costs 3?", "db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": gold}}
    table = await play(tmp_path, "text2sql", [row], env_config={"db_path": str(tmp_path)})
    step = await table.say("<think>look</think>\n<sql>select * from fruit</sql>")
    assert not step.done and "pear" in step.messages[0].text
    step = await table.say(f"<think>so</think>\n<solution>{gold}</solution>")
    assert step.done and step.reward == 1.0


@pytest.mark.parametrize(
    ("id", "rows", "problem"),
    [
        ("gsm9k", GSM8K, "did you mean gsm8k"),
        ("lcb", GSM8K, "runs what the policy writes"),
        ("gsm8k", [{"prompt": 3}], "prompt must be a text, or a list of messages"),
        ("gsm8k", [{"prompt": [{"role": "user"}]}], "a list of messages with role and content"),
    ],
)
def test_wrong_config_is_refused(tmp_path: Path, id: str, rows: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("skyrl_gym", config(tmp_path, id, rows))


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn", "aime"])
async def test_columns_that_an_environment_lacks_are_named(tmp_path: Path, id: str) -> None:
    settings = config(tmp_path, id, [{"prompt": "1 + 1", "answer": "2"}])
    with pytest.raises(RowError, match=rf"line 1: skyrl-gym's {id} needs more of a row: .*; its columns are .*answer"):
        await sit("skyrl_gym", **settings)
    with pytest.raises(SpecError, match="needs more of a row"):
        rehearse("skyrl_gym", *check("skyrl_gym", settings))
