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
import asyncio
import json
import time
from itertools import count
from typing import Any

import numpy as np
import uvloop

from loadtest._machine import Meter
from loadtest.env_plane import serving
from opentinker.envs.base import Action, Opening
from opentinker.envs.registry import make
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.env_protocol import Policy, StepSession

LONGEST = 1000
"""Turns of an episode, for environments that never end."""


async def played(name: str, config: dict[str, Any], row: int, texts: list[str] | None, say: str | None) -> list[str]:
    """One episode in this process: what was said. `texts`: from an earlier time."""
    environment = make(name, config, modules=True)
    opened = await environment.open(row, 0)
    seat = opened.seat if isinstance(opened, Opening) else environment.seats[0]
    said: list[str] = []
    try:
        for turn in range(LONGEST):
            text = texts[turn] if texts else say or environment.gold()
            if text is None:
                raise SystemExit(f"{name} has no expert: give what is to be said in every turn with --say TEXT")
            if isinstance(text, Message):
                raise SystemExit(f"the expert of {name} calls tools: give what is to be said with --say TEXT")
            said.append(text)
            step = await environment.step(Action(text=text, stop=StopReason.EOS, turn=turn, seat=seat))
            if step.done:
                break
            seat = step.seat
    finally:
        await environment.close()
    return said


class Client:
    """Plays sessions until told to stop; counts only while `counting`."""

    def __init__(self, bus: Bus, arguments: argparse.Namespace, episodes: list[list[str]]) -> None:
        self.sessions, self.arguments, self.episodes = EnvClient(bus), arguments, episodes
        self.counting = self.stop = False
        self.begun = asyncio.Event()
        self.latencies: list[float] = []
        self.ended: list[float] = []
        """`exact` of each episode that came to its end, also before the counting."""

    async def play(self, number: int) -> None:
        for episode in count(number):
            if self.stop:
                return
            await self._episode(f"load-{number}-{episode}", episode % len(self.episodes))

    async def _episode(self, session: str, row: int) -> None:
        reply = await self.sessions.open(
            job="load",
            session=session,
            environment=self.arguments.name,
            isolation="process",
            config=self.arguments.config,
            row=row,
            seed=0,
            deadline_s=600.0,
            policy=Policy(model="load", context_length=4096),
        )
        assert reply.failure is None, reply.error
        for turn, text in enumerate(self.episodes[row]):
            began = time.perf_counter()
            reply = await self.sessions.step(
                reply.worker, StepSession(session=session, turn=turn, seat=reply.seat, text=text, stop=StopReason.EOS)
            )
            assert reply.failure is None, reply.error
            self.begun.set()
            if self.counting:
                self.latencies.append(time.perf_counter() - began)
            if self.stop:
                break
        if reply.done:
            self.ended.append(reply.metrics.get("exact", 0.0))
        else:
            await self.sessions.close(worker=reply.worker, session=session)


async def alone(arguments: argparse.Namespace, episodes: list[list[str]]) -> tuple[float, float]:
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
    async with Bus.connect(url, "load", "rollout-worker") as bus, asyncio.TaskGroup() as players:
        client = Client(bus, arguments, episodes)
        for number in range(arguments.sessions):
            players.create_task(client.play(number))
        await client.begun.wait()
        await asyncio.sleep(arguments.warm_up)
        children = {f"child {number}": pid for number, pid in enumerate(below(pids["env-worker"]))}
        meter, client.counting = Meter(pids | children), True
        await asyncio.sleep(arguments.seconds)
        meter.stop()
        client.counting, client.stop = False, True
    steps = len(client.latencies)
    p50, p99 = np.percentile(client.latencies, [50, 99]) * 1e3
    print(
        f"{arguments.name} {json.dumps(arguments.config)}: {np.mean([len(e) for e in episodes]):.1f} steps an episode"
    )
    print(f"alone: {own:,.0f} steps/s, {own_cpu * 1e6:,.0f} CPU-us per step")
    print(
        f"served: {steps / meter.seconds:,.0f} steps/s at {arguments.sessions} sessions; p50 {p50:.2f} p99 {p99:.2f} ms"
    )
    print(f"ended: {len(client.ended):,} episodes, {sum(client.ended):,.0f} of them right")
    used = {name: meter.used[name] for name in pids} | {"children": sum(meter.used[name] for name in children)}
    print("CPU-us per step: " + ", ".join(f"{name} {value / steps * 1e6:,.0f}" for name, value in used.items()))
    busiest = max(used["env-worker"], *(meter.used[name] for name in children), 1e-9)
    print(f"ceiling of an env worker with enough cores: {steps / busiest:,.0f} steps/s")
    print(f"cores used by others meanwhile: {meter.foreign:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
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
