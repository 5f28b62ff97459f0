"""Measures how many steps per second one env worker plays of an environment, with and without the wire.

    python -m loadtest.environment NAME [--config JSON] [--sessions 64] [--seconds 5] [--warm-up 1] [--episodes 32]
                                        [--say TEXT] [--children N]

The environment's own expert plays `episodes` start states in this process first; then what it said is played again: in
one thread, as an env worker plays it but without the wire, and by `sessions` episodes at once through an env worker and
a real NATS server. `--say` is for environments without an expert: every action is that text. `module:Class` names work
too. Opening and closing episodes is in all the times. `--children`: so many child processes for an environment that
blocks, with as many sessions in each as it takes (default: those of an env worker, 2 with 8). Prints steps/s, CPU time,
and how many episodes ended and were right (`exact`); other processes on the machine disturb the first more than the
second, and their share is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import cycle

import numpy as np
import uvloop

from loadtest.env_plane import serving
from loadtest.support.players import Players, Turns, options
from opentinker.local.trial_episode import Repeating, Tried, expert, play
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import OpenSession, Policy


async def first_time(arguments: argparse.Namespace, row: int) -> Tried:
    """Play with the expert, or with the words of --say, in this process."""
    said = None if arguments.say is None else Message(role="assistant", content=arguments.say)
    tried = await play(arguments.name, arguments.config, expert if said is None else lambda *_: said, row=row, seed=0)
    if tried.failure:
        raise SystemExit(tried.failure)
    if not tried.turns or any(message.tool_calls for _, message in tried.said):
        lacking = "has an expert that calls tools" if tried.turns else "has no expert"
        raise SystemExit(f"{arguments.name} {lacking}: give what is to be said in every turn with --say TEXT")
    return tried


async def alone(arguments: argparse.Namespace, episodes: list[Tried]) -> tuple[float, float]:
    """Steps and CPU seconds per step, one episode after another in this thread."""
    steps, cpu, began = 0, time.process_time(), time.perf_counter()
    for tried in cycle(episodes):
        again = await play(arguments.name, arguments.config, Repeating(tried.said), row=tried.row, seed=0)
        steps += len(again.turns)
        if time.perf_counter() - began > arguments.seconds:
            break
    return steps / (time.perf_counter() - began), (time.process_time() - cpu) / steps


async def measure(arguments: argparse.Namespace, url: str, pids: dict[str, int]) -> None:
    tried = [await first_time(arguments, row) for row in range(arguments.episodes)]
    episodes: list[Turns] = [[[message.text for _, message in turn] for turn in one.turns] for one in tried]
    own, own_cpu = await alone(arguments, tried)
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
