"""Plays an episode of each built-in environment and keeps it in envs/examples.json, for `opentinker env about`, the
page and the API. What no episode can be played of here has a note there, which says what it needs.

    python -m examples.record_episodes              # after `make setup games browser`
    python -m examples.record_episodes gem ors      # these, when what SERVED says of them is there
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson

from opentinker.envs.examples import FILE, Example, examples
from opentinker.envs.registry import BUILT_IN
from opentinker.local.env_trial import Asked, play_row
from opentinker.local.harbor_check import add_tasks
from opentinker.local.trial_episode import Guessing, Tried, expert, play
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.types.core import Message, ToolCall

HERE = Path(__file__).resolve().parent
TURNS = 8
CHARACTERS = 5000
ROWS: dict[str, dict[str, Any]] = {
    "math": {"problem": "What is 2 + 3?", "answer": "5"},
    "skyrl_gym": {"prompt": "What is 2 + 3?", "reward_spec": {"ground_truth": "5"}, "max_turns": 3},
}
"""Environment -> a row of data of our own."""
CONFIGS: dict[str, dict[str, Any]] = {
    "agent_program": {"command": ["python3", "two_calls.py"], "directory": "examples/agents"},
    "alfworld": {"path": "examples/data/alfworld"},
    "gem": {"id": "game:GuessTheNumber-v0-easy"},
    "gymnasium": {"id": "FrozenLake-v1"},
    "harbor": {"tasks": "harbor-tasks"},
    "harbor_agent": {"tasks": "harbor-tasks", "command": "python3 /agent/main.py", "files": "examples/agents/shell"},
    "miniwob": {"tasks": ["click-test"]},
    "openenv": {"url": "ws://127.0.0.1:8000"},
    "ors": {"url": "http://127.0.0.1:8001"},
    "pettingzoo": {"id": "classic/tictactoe_v3"},
    "skyrl_gym": {"id": "gsm8k_multi_turn"},
    "textarena": {"id": "GuessTheNumber-v0"},
    "verifiers": {
        "id": "verifiers_sums", "python": "/opt/verifiers/bin/python", "paths": ["examples/libraries"],
    },
}  # fmt: skip
SUM = "awk '{s += $2} END {print s}' /app/stock.txt > /app/answer.txt"
ANSWERS: dict[str, list[str | dict[str, Any]]] = {
    "agent_program": ["3", "6"],
    "gem": ["\\boxed{5}"],
    "harbor": [
        {"name": "bash", "arguments": {"command": "cat /app/stock.txt"}},
        {"name": "bash", "arguments": {"command": SUM}},
        "The sum is in /app/answer.txt.",
    ],
    "harbor_agent": ["cat /app/stock.txt", SUM, "done"],
    "openenv": ["Hello", "A longer message earns more."],
    "ors": [{"name": "hint", "arguments": {}}, {"name": "answer", "arguments": {"number": 20}}],
    "pettingzoo": ["4", "0", "3", "2", "5"],
    "skyrl_gym": ["5", "2 + 3 = 5\n#### 5"],
    "textarena": ["[10]", "[5]", "[7]", "[8]", "[9]"],
    "verifiers": ["10 + 17 = 10 + 10 + 7 = 27. The answer is \\boxed{27}."],
}
"""Environment without an expert -> what a script answers it, a tool call as an object."""
SERVED = {
    "gem": "docs/environments/adapters.md, `Libraries with conflicting dependencies`",
    "openenv": "the first lines of examples/openenv.toml",
    "ors": "examples/libraries/ors_sums.py",
    "verifiers": "examples/libraries/verifiers_sums.py",
}
"""Environment -> where it says how to install or start what its episode needs."""
NEEDS = {"android_world": "emulated phones, `config.phones` (docs/environments/phones.md)"}
"""Environment -> what an episode needs that is not here."""


def example(name: str) -> Example:
    """Play an environment by its script, by its expert, or by guesses if it has neither. Raises ValueError."""
    if name in NEEDS:
        check = f"`opentinker env check {name} --set ... --save` plays one and keeps it for this place"
        return {"note": f"An episode needs {NEEDS[name]}. {check}."}
    with tempfile.TemporaryDirectory() as folder:
        config = dict(CONFIGS.get(name, {}))
        if name in ROWS:
            path = Path(folder, "rows.jsonl")
            path.write_bytes(orjson.dumps(ROWS[name]))
            config["path"] = str(path)
        who, tried = _played(name, config)
    shown = {**config, "path": "rows.jsonl"} if name in ROWS else config
    told = f", config = {orjson.dumps(shown).decode()}" if shown else ""
    text = tried.transcript()
    return {"played": f"Played by {who}{told}.", "transcript": text[:CHARACTERS] + ("..." if text[CHARACTERS:] else "")}


def _played(name: str, config: dict[str, Any]) -> tuple[str, Tried]:
    if name in ANSWERS:
        answers = [_message(number, one) for number, one in enumerate(ANSWERS[name])]
        return "a script", _whole(play_row(Asked(name, config, 1, 0, len(answers), row=0, answers=answers)))
    for who, policy in (("its scripted expert", expert), ("random guesses", Guessing(0))):
        tried = _whole(asyncio.run(play(name, config, policy, row=0, seed=0, turns=TURNS)))
        if tried.turns:
            return who, tried
    raise ValueError(f"{name} asks nobody")


def _message(number: int, answer: str | dict[str, Any]) -> Message:
    if isinstance(answer, str):
        return Message(role="assistant", content=answer)
    return Message(role="assistant", content="", tool_calls=[ToolCall(id=f"call_{number}", **answer)])


def _whole(tried: Tried) -> Tried:
    if tried.failure:
        raise ValueError(tried.failure)
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.record_episodes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="an environment; default: all but those of SERVED")
    names = parser.parse_args().names or sorted(BUILT_IN.keys() - SERVED.keys())
    if unknown := set(names) - BUILT_IN.keys():
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    os.environ[VARIABLE] = ",".join(LOOPBACK)  # as `opentinker run` has it
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OPENTINKER_DATA_DIR"] = folder
        if any(name.startswith("harbor") for name in names):
            add_tasks(HERE / "data" / "harbor-tasks", None, lambda _: None)
        found = {**examples(), **{name: example(name) for name in names}}
    FILE.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n")


if __name__ == "__main__":
    main()
