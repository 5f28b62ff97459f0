"""How many trivial environment steps per second one env worker serves over a real NATS server.

    python -m loadtest.env_plane [--sessions 64] [--seconds 5] [--turns 200] [--warm-up 1]

Starts nats-server and a Redis-compatible server on free ports, one env worker, and a client in this process that plays
`sessions` episodes at once (64-character actions, 200-character observations, a new episode after `turns` steps).
Prints steps/s, latency of a step, and CPU time per step of each process; exit status 1 if the target is missed. Other
processes on the machine disturb steps/s but hardly the CPU time; their share is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import uvloop

from loadtest._machine import Meter, met
from loadtest._processes import nats_pid, own_servers, started
from opentinker.envs.base import Action, Environment, Step, user
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession

ACTION, OBSERVATION = "a" * 64, "o" * 200
ENVIRONMENT = "loadtest.env_plane:Echo"
TARGET = 10_000


class Echo(Environment):
    """Does nothing, so that everything measured is ours."""

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(OBSERVATION)]

    async def step(self, action: Action) -> Step:
        return Step(messages=[user(OBSERVATION)], reward=1.0)


class Client:
    """Plays sessions until told to stop; counts only while `counting`."""

    def __init__(self, bus: Bus, turns: int, environment: str = ENVIRONMENT, job: str = "load") -> None:
        self.sessions = EnvClient(bus)
        self.environment, self.job = environment, job
        self.turns = turns
        self.counting = self.stop = False
        self.latencies: list[float] = []

    async def open(self, session: str, row: int, seed: int) -> SessionReply:
        request = OpenSession(
            job=self.job, session=session, environment=self.environment, config={}, row=row, seed=seed, deadline_s=60.0
        )
        reply = await self.sessions.open(request)
        assert reply.failure is None, reply.error
        return reply

    async def wait(self) -> None:
        """Until whoever plays is there, and has played."""
        reply = await self.open("probe", 0, 0)
        await self.sessions.close(worker=reply.worker, session="probe")

    async def play(self, number: int) -> None:
        episode = 0
        while not self.stop:
            session = f"load-{number}-{episode}"
            episode += 1
            reply = await self.open(session, episode, number)
            for turn in range(self.turns):
                began = time.perf_counter()
                step = await self.sessions.step(
                    reply.worker, StepSession(session=session, turn=turn, text=ACTION, stop=StopReason.EOS)
                )
                assert step.failure is None, step.error
                if self.counting:
                    self.latencies.append(time.perf_counter() - began)
                if self.stop:
                    break
            await self.sessions.close(worker=reply.worker, session=session)


def options(doc: str | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--warm-up", type=float, default=1.0)
    return parser.parse_args()


async def measure(client: Client, arguments: argparse.Namespace, pids: dict[str, int], target: float) -> bool:
    """Plays `sessions` episodes at once, prints what came of it, and says whether the target was met."""
    await client.wait()
    players = [asyncio.create_task(client.play(number)) for number in range(arguments.sessions)]
    await asyncio.sleep(arguments.warm_up)
    meter, client.counting = Meter(pids), True
    await asyncio.sleep(arguments.seconds)
    meter.stop()
    client.counting = False
    client.stop = True
    await asyncio.gather(*players)
    steps = len(client.latencies)
    p50, p99 = np.percentile(client.latencies, [50, 99]) * 1e3
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
        return await measure(Client(bus, arguments.turns), arguments, pids, TARGET)


def main() -> None:
    arguments = options(__doc__)
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
