"""Rows of environments, as env workers list them for people to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from opentinker.envs.runtime.data_rows import PROMPT_BYTES, sound_rows
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_ROWS
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import EnvRow, EnvRows, EnvRowsReply
from tests.conftest import WAIT_S
from tests.integration.rollout_worker.env_workers import Workers, workers

__all__ = ["workers"]


async def rows_of(bus: Bus, name: str, config: dict[str, Any] | None = None, **wanted: Any) -> EnvRowsReply:
    return await bus.request(ENV_ROWS, EnvRows(name=name, config=config or {}, job="j", **wanted), WAIT_S)


async def test_rows_are_found_by_their_text_and_shown_with_the_tools_of_the_job(workers: Workers, bus: Bus) -> None:
    await workers.start("env-0")
    tools: list[dict[str, Any]] = [{"type": "python", "timeout_s": 20.0}]
    reply = await rows_of(bus, "gsm8k", tools=tools, text="NATALIA SOLD CLIPS", numbers=[1, 7472, 7473])
    assert (reply.problem, reply.count, reply.found, reply.searched) == ("", 7473, [0], 7473)
    assert [row.number for row in reply.rows] == [1, 7472] and [tool.name for tool in reply.tools] == ["python"]
    assert reply.rows[0].messages[0].text.startswith("Weng earns $12")


async def test_a_wrong_row_says_why_and_the_others_are_shown(workers: Workers, bus: Bus, tmp_path: Path) -> None:
    await workers.start("env-0", OPENTINKER_DATA_DIR=str(tmp_path / "data"))
    path = tmp_path / "rows.jsonl"
    lines = [
        {"problem": "p0", "answer": "1"},
        {"problem": "p1"},
        {"problem": 3.5},
        {"q": 1},
        {"problem": "x" * PROMPT_BYTES},
    ]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    good, bad, long = (await rows_of(bus, "math", {"path": str(path)}, numbers=[2, 3, 4])).rows
    assert good.place == f"{path}, line 3" and good.messages[0].text.startswith("3.5")
    assert "problem is missing" in bad.problem and bad.messages == [] == long.messages
    assert f"at most {PROMPT_BYTES:,} are shown" in long.problem
    games = await rows_of(bus, "copy_digits")
    assert (games.count, games.problem) == (None, "")
    assert "environment.config.split" in (await rows_of(bus, "gsm8k", {"split": "dev"})).problem
    kept = f"{tmp_path}/data/jobs/j-bbbbbbbbbb/rows.jsonl"
    assert "kept by the server" in (await rows_of(bus, "math", {"path": kept})).problem


async def test_rows_of_an_environment_that_blocks_are_listed_by_a_child(workers: Workers, bus: Bus) -> None:
    await workers.start("env-0")
    reply = await rows_of(bus, "tests.samples.listed_rows:Listed", text="Row 1", numbers=[0, 2])
    assert (reply.problem, reply.count, reply.found) == ("", 3, [1])
    assert [row.messages[0].text for row in reply.rows] == ["row 0", "row 2"]
    assert "the shelf is empty" in (await rows_of(bus, "tests.samples.listed_rows:Raises")).problem


def test_answers_of_an_untrusted_process_are_bounded() -> None:
    asked = EnvRows(name="e", config={}, job="j", numbers=[1])
    long = EnvRow(number=1, messages=[Message(role="user", content="x" * PROMPT_BYTES)])
    given = EnvRowsReply(
        count=5, found=[4, 9, -1, 4], searched=99, rows=[EnvRow(number=1, images=-1), EnvRow(number=2), long]
    )
    found = sound_rows(given, asked)
    assert (found.found, found.searched, found.rows) == ([4], 5, [EnvRow(number=1)])
    assert sound_rows(None, asked).problem and sound_rows(EnvRowsReply(), asked).count is None
