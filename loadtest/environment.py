"""How many steps per second one env worker plays of an environment, and how many there would be without the wire.

    python -m loadtest.environment NAME [--config JSON] [--sessions 64] [--seconds 5] [--warm-up 1] [--episodes 32]
                                        [--say TEXT] [--children N]

The environment's own expert plays `episodes` start states in this process first; then what it said is played again: in
one thread, with nothing in between, and by `sessions` episodes at once through an env worker and a real NATS server.
`--say` is for environments without an expert: every action is that text. `module:Class` names work too. Opening and
closing episodes is in all the times. `--children`: so many child processes for an environment that blocks, with as
many sessions in each as it takes (default: those of an env worker, 2 with 8). Prints steps/s, CPU time, and how many
episodes ended and were right (`exact`); other processes on the machine disturb the first more than the second, and
their share is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import count
from typing import Any

import numpy as np
import uvloop

from loadtest._players import Players, Turns, options
from loadtest.env_plane import serving
from opentinker.envs.base import Action, Environment, Opening, Step
from opentinker.envs.registry import make
from opentinker.envs.rounds import as_opening, play_actions, prompts_of
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, Policy

LONGEST = 1000
"""Turns of an episode, for environments that never end."""


async def played(name: str, config: dict[str, Any], row: int, texts: Turns | None, say: str | None) -> Turns:
    """One episode in this process: what was said. `texts`: from an earlier time."""
    environment = make(name, config, modules=True)
    asked: Opening | Step = as_opening(environment, await environment.open(row, 0))
    said: Turns = []
    try:
        for turn in range(LONGEST):
            seats = list(prompts_of(environment, asked, "step" if turn else "open"))
            said.append(texts[turn] if texts else [say or _expert(environment, asked, seat) for seat in seats])
            actions = [
                Action(text=text, stop=StopReason.EOS, turn=turn, seat=seat)
                for seat, text in zip(seats, said[-1], strict=True)
            ]
            asked = await play_actions(environment, asked, actions)
            if asked.done:
                break
    finally:
        await environment.close()
    return said


def _expert(environment: Environment, asked: Opening | Step, seat: str) -> str:
    gold = environment.gold() if asked.acting is None else environment.gold_of(seat)
    if isinstance(gold, str):
        return gold
    lacking = "has no expert" if gold is None else "has an expert that calls tools"
    raise SystemExit(f"{type(environment).__name__} {lacking}: give what is to be said in every turn with --say TEXT")


async def alone(arguments: argparse.Namespace, episodes: list[Turns]) -> tuple[float, float]:
    """Steps and CPU seconds per step, one episode after another in this thread."""
    steps, cpu, began = 0, time.process_time(), time.perf_counter()
    for row in count():
        texts = episodes[row % len(episodes)]
        await played(arguments.name, arguments.config, row % len(episodes), texts, None)
        steps += len(texts)
        if time.perf_counter() - began > arguments.seconds:
            break
    return steps / (time.perf_counter() - began), (time.process_time() - cpu) / steps


async def measure(arguments: argparse.Namespace, url: str, pids: dict[str, int]) -> None:
    episodes = [
        await played(arguments.name, arguments.config, row, None, arguments.say) for row in range(arguments.episodes)
    ]
    own, own_cpu = await alone(arguments, episodes)
    opening = OpenSession(
        job="load", session="", environment=arguments.name, config=arguments.config, row=0, seed=0, deadline_s=600.0,
        policy=Policy(model="load", context_length=4096),
    )  # fmt: skip

    def children() -> dict[str, int]:
        return {f"child {number}": pid for number, pid in enumerate(below(pids["env-worker"]))}

    async with Bus.connect(url, "load", "rollout-worker") as bus:
        players = Players(bus, opening, episodes)
        meter = await players.measure(arguments, lambda: pids | children())
    children_used = [used for name, used in meter.used.items() if name not in pids]
    steps = len(players.latencies)
    p50, p99 = players.quantiles_ms()
    print(
        f"{arguments.name} {json.dumps(arguments.config)}: {np.mean([len(e) for e in episodes]):.1f} steps an episode"
    )
    print(f"alone: {own:,.0f} steps/s, {own_cpu * 1e6:,.0f} CPU-us per step")
    print(
        f"served: {steps / meter.seconds:,.0f} steps/s at {arguments.sessions} sessions; p50 {p50:.2f} p99 {p99:.2f} ms"
    )
    print(f"ended: {len(players.ended):,} episodes, {sum(players.ended):,.0f} of them right")
    used = {name: meter.used[name] for name in pids} | {"children": sum(children_used)}
    print("CPU-us per step: " + ", ".join(f"{name} {value / steps * 1e6:,.0f}" for name, value in used.items()))
    busiest = max(used["env-worker"], *children_used, 1e-9)
    print(f"ceiling of an env worker with enough cores: {steps / busiest:,.0f} steps/s")
    print(f"cores used by others meanwhile: {meter.foreign:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--config", type=json.loads, default={})
    options(parser)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--say")
    parser.add_argument("--children", type=int)
    arguments = parser.parse_args()
    children = {}
    if arguments.children:
        per_child = -(-arguments.sessions // arguments.children)
        children = {"env_children": arguments.children, "env_sessions_per_child": per_child}
    with serving(**children) as (url, pids):
        uvloop.run(measure(arguments, url, pids))


if __name__ == "__main__":
    main()
