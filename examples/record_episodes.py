"""Plays an episode of each built-in environment and keeps it in envs/examples.json, for `opentinker env about` and the
API. What no episode can be played of here has a note there, which says what it needs.

    python -m examples.record_episodes
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import orjson

from opentinker.envs.examples import FILE, Example
from opentinker.envs.registry import BUILT_IN
from opentinker.local.trial_episode import Guessing, Tried, expert, play

TURNS = 4
CHARACTERS = 3000
ROWS = {
    "math": {"problem": "What is 2 + 3?", "answer": "5"},
}
"""Environment -> a row of data of our own."""
CONFIGS: dict[str, dict[str, Any]] = {
    "gymnasium": {"id": "FrozenLake-v1"},
    "miniwob": {"tasks": ["click-test"]},
    "pettingzoo": {"id": "classic/tictactoe_v3"},
}
NEEDS = {
    "agent_program": "a program of yours, `config.command`, which plays by asking the job's endpoint",
    "alfworld": "the games of ALFWorld, `config.path`",
    "android_world": "emulated phones, `config.phones`",
    "gem": "the library gem in a virtual environment of its own, and the `config.id` of a game",
    "harbor": "tasks in the format of Harbor, `config.tasks`",
    "harbor_agent": "tasks in the format of Harbor, `config.tasks`, and an agent program, `config.command`",
    "openenv": "a server of OpenEnv, `config.url`",
    "ors": "a server of the Open Reward Standard, `config.url`",
    "skyrl_gym": "rows of data, `config.path`, and the `config.id` of an environment",
    "textarena": "the `config.id` of a game, whose words the library downloads",
    "verifiers": "the `config.id` of an environment of the library verifiers",
}
"""Environment -> what an episode needs that a fresh installation does not have."""


def example(name: str) -> Example:
    """Play an environment by its expert, or by guesses if it has none. Raises ValueError."""
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
    shown = {**config, "path": "rows.jsonl"} if "path" in config else config
    told = f", config = {orjson.dumps(shown).decode()}" if shown else ""
    text = tried.transcript()
    return {"played": f"Played by {who}{told}.", "transcript": text[:CHARACTERS] + ("..." if text[CHARACTERS:] else "")}


def _played(name: str, config: dict[str, Any]) -> tuple[str, Tried]:
    for who, policy in (("its scripted expert", expert), ("random guesses", Guessing(0))):
        tried = asyncio.run(play(name, config, policy, row=0, seed=0, turns=TURNS))
        if tried.failure:
            raise ValueError(tried.failure)
        if tried.turns:
            return who, tried
    raise ValueError(f"{name} asks nobody")


def main() -> None:
    found = {name: example(name) for name in sorted(BUILT_IN)}
    FILE.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
