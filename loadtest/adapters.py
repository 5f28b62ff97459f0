"""Measures how many of a library's steps per second are left when an adapter plays it.

    python -m loadtest.adapters [--seconds 4] [--only TEXT]

For each environment: the library alone in this process, then the same through an env worker's sessions and one of its
child processes, eight episodes side by side. Rates are per second of processor time, of this process and of the child,
for the child is what limits an env worker here and what else runs on the machine has no part in it. What takes the
library more than a millisecond a step must keep 90 % of its rate; exit status 1 if it does not. A step of reasoning-gym
is a whole question: made, answered, scored.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from loadtest.support.machine import Meter
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, StepSession

SESSIONS = 8
SHARE = 0.9
SLOW_S = 1e-3


def gymnasium(config: dict[str, Any], text: str) -> Iterator[None]:
    import gymnasium

    from opentinker.envs.adapters import env_notes, spaces

    env_notes.register(config["id"])
    environment = gymnasium.make(config["id"], disable_env_checker=True)
    action = spaces.read(environment.action_space, text, env_notes.names_of(config["id"], environment))
    for seed in count():
        environment.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, _ = environment.step(action)
            over = terminated or truncated
            yield


def pettingzoo(config: dict[str, Any], text: str) -> Iterator[None]:
    import pettingzoo

    environment = pettingzoo.make("aec", config["id"])
    for seed in count():
        environment.reset(seed=seed)
        while environment.agents:
            observation, _, terminated, truncated, _ = environment.last()
            if terminated or truncated:
                environment.step(None)
                continue
            mask = observation["action_mask"]
            environment.step(int(mask.argmax()))
            yield


def textarena(config: dict[str, Any], text: str) -> Iterator[None]:
    import textarena

    environment = textarena.make(config["id"])
    for seed in count():
        environment.reset(num_players=config.get("players", 1), seed=seed)
        over = False
        while not over:
            environment.get_observation()
            over, _ = environment.step(text)
            yield
        environment.close()


def reasoning_gym(config: dict[str, Any], text: str) -> Iterator[None]:
    import reasoning_gym

    data = reasoning_gym.create_dataset(config["dataset"], seed=0, size=10_000)
    for row in count():
        data.score_answer(text, data[row])
        yield


ALONE: dict[str, Callable[[dict[str, Any], str], Iterator[None]]] = {
    "gymnasium": gymnasium,
    "pettingzoo": pettingzoo,
    "textarena": textarena,
    "reasoning_gym": reasoning_gym,
}
PLAYED: list[tuple[str, dict[str, Any], str]] = [
    ("gymnasium", {"id": "FrozenLake-v1"}, "right"),
    ("gymnasium", {"id": "Blackjack-v1"}, "hit"),
    ("gymnasium", {"id": "BabyAI-GoToRedBall-v0"}, "left"),
    ("pettingzoo", {"id": "classic/tictactoe_v3"}, "first"),
    ("pettingzoo", {"id": "classic/chess_v6"}, "first"),
    ("textarena", {"id": "GuessTheNumber-v0"}, "[5]"),
    ("textarena", {"id": "TicTacToe-v0", "players": 2}, "[4]"),
    ("reasoning_gym", {"dataset": "chain_sum"}, "7"),
    ("reasoning_gym", {"dataset": "countdown"}, "7"),
    ("reasoning_gym", {"dataset": "sudoku"}, "7"),
]


def alone(name: str, config: dict[str, Any], text: str, seconds: float) -> float:
    """Steps per second of processor time of the library."""
    steps = ALONE[name](config, text)
    next(steps)
    began, done = time.process_time(), 0
    while (spent := time.process_time() - began) < seconds:
        next(steps)
        done += 1
    return done / spent


async def served(name: str, config: dict[str, Any], text: str, seconds: float) -> float:
    """Steps per second of processor time of a child process of an env worker."""
    host = ChildPool(children=1, per_child=SESSIONS, modules=False)
    sessions = Sessions("w", limit=SESSIONS, resolver=Resolver(modules=False), host=host)
    steps, over = 0, False
    warm = asyncio.Event()

    async def play(number: int) -> None:
        nonlocal steps
        for row in count(number, SESSIONS):
            opening = OpenSession(job="load", session=str(row), environment=name, config=config, row=row, seed=0,
                                  deadline_s=600, answer_within_s=600)  # fmt: skip
            reply = await sessions.open(opening)
            for turn in count():
                assert reply.failure is None, reply.error
                if over or reply.done:
                    break
                said = text if text != "first" else first(reply.messages[0].text)
                call = StepSession(session=str(row), turn=turn, seat=reply.seat, text=said, stop=StopReason.EOS)
                reply = await sessions.step(call)
                steps += 1
                if steps >= SESSIONS:
                    warm.set()
            await sessions.close(CloseSession(session=str(row)))
            if over:
                break

    players = [asyncio.create_task(play(number)) for number in range(SESSIONS)]
    await warm.wait()
    child = below(os.getpid())[-1]  # the player, below its keeper
    meter, before = Meter({"child": child}), steps
    await asyncio.sleep(2 * seconds)
    meter.stop()
    rate = (steps - before) / meter.used["child"]
    over = True
    await asyncio.gather(*players)
    await host.close()
    return rate


def first(prompt: str) -> str:
    """Of the possible actions."""
    return prompt.rpartition("Possible: ")[2].split(",")[0].rstrip(".") if "Possible: " in prompt else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="", help="environments whose name or config has this in it")
    arguments = parser.parse_args()
    missed = False
    for name, config, text in PLAYED:
        title = f"{name} {config.get('id') or config.get('dataset')}"
        if arguments.only not in title:
            continue
        own = alone(name, config, text, arguments.seconds)
        ours = asyncio.run(served(name, config, text, arguments.seconds))
        slow = 1 / own > SLOW_S
        verdict = "" if not slow else "  MISSED" if ours < SHARE * own else "  met"
        missed |= slow and ours < SHARE * own
        print(f"{title:40} library {own:10,.0f}/s  env worker {ours:8,.0f}/s  {ours / own:4.0%}{verdict}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
