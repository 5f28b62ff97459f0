"""Measures how many trivial environment steps per second one env worker serves over a real NATS server.

    python -m loadtest.env_plane [--sessions 64] [--seconds 5] [--turns 200] [--warm-up 1]

Starts nats-server and a Redis-compatible server on free ports, one env worker, and a client in this process that plays
`sessions` episodes at once (64-character actions, 200-character observations, a new episode after `turns` steps).
Prints steps/s, latency of a step, and CPU time per step of each process; exit status 1 if the target is missed. Other
processes on the machine disturb steps/s but hardly the CPU time; their share is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from loadtest.support.machine import met
from loadtest.support.players import Players, options
from loadtest.support.processes import nats_pid, own_servers, started
from opentinker.envs.base import Action, Environment, Step, user
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import OpenSession

ACTION, OBSERVATION = "a" * 64, "o" * 200
ENVIRONMENT = "loadtest.env_plane:Echo"
TARGET = 10_000


class Echo(Environment):
    """Does nothing, so that everything measured is ours."""

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(OBSERVATION)]

    async def step(self, action: Action) -> Step:
        return Step(messages=[user(OBSERVATION)], reward=1.0)


def arguments_of(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--turns", type=int, default=200)
    return parser.parse_args()


async def measure(
    bus: Bus, arguments: argparse.Namespace, pids: dict[str, int], target: float, *,
    environment: str = ENVIRONMENT, job: str = "load",
) -> bool:  # fmt: skip
    """Play, print what came of it, and say whether the target was met."""
    opening = OpenSession(job=job, session="", environment=environment, config={}, row=0, seed=0, deadline_s=60.0)
    players = Players(bus, opening, [[[ACTION]] * arguments.turns])
    meter = await players.measure(arguments, lambda: pids)
    steps = len(players.latencies)
    p50, p99 = players.quantiles_ms()
    per_step = ", ".join(f"{name} {value / steps * 1e6:.0f}" for name, value in meter.used.items())
    rate = steps / meter.seconds
    print(f"{rate:,.0f} steps/s at {arguments.sessions} sessions; a step takes p50 {p50:.2f} p99 {p99:.2f} ms")
    print(f"CPU-us per step: {per_step}, together {sum(meter.used.values()) / steps * 1e6:.0f}")
    if "env-worker" in meter.used:
        ceiling = steps / meter.used["env-worker"]
        print(f"ceiling of an env worker with a core of its own: {ceiling:,.0f} steps/s")
    print(f"cores used by others meanwhile: {meter.foreign:.2f}")
    return met("steps/s", rate, target, meter.foreign)


async def run(arguments: argparse.Namespace, url: str, pids: dict[str, int]) -> bool:
    async with Bus.connect(url, "load", "rollout-worker") as bus:  # whom env workers may answer
        return await measure(bus, arguments, pids, TARGET)


def main() -> None:
    arguments = arguments_of(__doc__)
    with serving() as (url, pids):
        good = uvloop.run(run(arguments, url, pids))
    sys.exit(0 if good else 1)


@contextmanager
def serving(**settings: object) -> Iterator[tuple[str, dict[str, int]]]:
    """Servers and an env worker of their own, with these settings: the URL of NATS, and the processes to look at."""
    with own_servers() as (servers, _), started(servers, "env-worker", env_modules="1", **settings) as worker:
        yield servers.operator_url("nats"), {"env-worker": worker, "client": os.getpid(), "nats": nats_pid(servers)}


if __name__ == "__main__":
    main()
