"""Measures how many trajectories per second go from a rollout worker's publish to the trainer's arrays, stored on disk
between.

    python -m loadtest.trajectory_plane [--seconds 5] [--window 64] [--rate 100] [--sync default always]

One producer process, one nats-server, one consumer process, all through `Bus` and `Consumer`, for groups of 8
trajectories of 512 tokens. First as fast as it goes (the producer keeps `window` publishes under way and at most
`backlog` groups ahead of the consumer), then at a fixed `rate` of groups for the latency from before encoding to after
decoding. Prints trajectories/s, CPU time per trajectory of each process, and the ceiling which that time would allow
on two cores: other work on the machine disturbs the first, hardly the others; its share is printed. Exit status 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtest.support.groups import GROUP_SIZE, JOB, TOKENS, make_group
from loadtest.support.machine import Meter, met
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.types.trajectories import Group
from tests.conftest import start_nats

TARGETS = {"default": 20_000, "always": 5_000}


@dataclass
class Shared:
    """Counters that both processes see."""

    received: Any = field(default_factory=lambda: mp.get_context("spawn").Value("q", 0))
    stop: Any = field(default_factory=lambda: mp.get_context("spawn").Event())


async def produce(url: str, shared: Shared, pipe: Connection, options: argparse.Namespace) -> None:
    """Publishes groups that carry, in `worker`, the time before encoding; sends the number of groups stored."""
    group = make_group()
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    sent = stored = 0
    run = time.monotonic_ns()

    async def one() -> None:
        nonlocal sent, stored
        number, sent = sent, sent + 1
        stamped = Group(**{**fields, "seq": number, "worker": str(time.monotonic())})
        await bus.publish(GROUP, stamped, f"{run}/{number}", job=JOB)
        stored += 1

    async def closed_loop() -> None:
        while not shared.stop.is_set():
            if sent - shared.received.value >= options.backlog:
                await asyncio.sleep(0.001)
            else:
                await one()

    async with Bus.connect(url, "producer") as bus:
        pipe.send("ready")
        if options.rate is None:
            await asyncio.gather(*(closed_loop() for _ in range(options.window)))
        else:
            tasks: set[asyncio.Task[None]] = set()
            began = time.monotonic()
            while not shared.stop.is_set():
                tasks.add(asyncio.create_task(one()))
                await asyncio.sleep(max(0.0, began + sent / options.rate - time.monotonic()))
            await asyncio.gather(*tasks)
    pipe.send(stored)


async def consume(url: str, shared: Shared, pipe: Connection, options: argparse.Namespace) -> None:
    """The trainer's intake: decode to arrays, look at every one, acknowledge. Sends the latencies."""
    latencies: list[float] = []
    async with Bus.connect(url, "consumer") as bus:
        consumer = await bus.consume(GROUP, "load", batch=options.batch, start_seq=1, job=JOB)
        pipe.send("ready")
        idle = False
        while not (idle and shared.stop.is_set()):
            delivery = await consumer.next(0.5)
            idle = delivery is None
            if delivery is None:
                continue
            assert delivery.noun is not None, delivery.error
            for trajectory in delivery.noun.trajectories:
                assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs) == TOKENS
                if options.check:
                    trajectory.check()
            latencies.append(time.monotonic() - float(delivery.noun.worker))
            await delivery.ack()
            shared.received.value += 1
        await consumer.close(delete=True)
    pipe.send(latencies)


def process(role: Any, *arguments: Any) -> None:
    uvloop.run(role(*arguments))


async def prepare(url: str) -> None:
    async with Bus.connect(url, "prepare") as bus:
        await bus.ensure_streams()


def measure(sync: str, options: argparse.Namespace) -> bool:
    """One run with a fresh server. False if it missed its target."""
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        server = start_nats(Path(directory), "2m" if sync == "default" else sync)
        url = server.url
        try:
            uvloop.run(prepare(url))
            shared = Shared()
            children = {}
            for name, role in (("consumer", consume), ("producer", produce)):
                ours, theirs = spawn.Pipe()
                child = spawn.Process(target=process, args=(role, url, shared, theirs, options), name=name)
                child.start()
                assert ours.recv() == "ready"
                children[name] = child, ours
            pids = {"producer": children["producer"][0].pid or 0, "nats": server.process.pid}
            pids["consumer"] = children["consumer"][0].pid or 0
            time.sleep(options.warm_up)
            meter, first = Meter(pids), shared.received.value
            time.sleep(options.seconds)
            groups = shared.received.value - first
            meter.stop()
            shared.stop.set()
            stored, latencies = children["producer"][1].recv(), children["consumer"][1].recv()
            for child, _ in children.values():
                child.join()
            assert len(latencies) == stored, f"{stored} groups were stored, {len(latencies)} arrived"
        finally:
            server.kill()
    return report(sync, options, groups * GROUP_SIZE, meter, latencies)


def report(sync: str, options: argparse.Namespace, trajectories: int, meter: Meter, latencies: list[float]) -> bool:
    p50, p99 = np.percentile(latencies[len(latencies) // 10 :], [50, 99]) * 1e3
    if options.rate is not None:
        print(f"sync {sync}, {options.rate} groups/s: end to end p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        return True
    each = {name: value / trajectories * 1e6 for name, value in meter.used.items()}
    total = sum(each.values())
    costs = ", ".join(f"{name} {value:.1f}" for name, value in each.items())
    rate = trajectories / meter.seconds
    print(
        f"sync {sync}, window {options.window}: {rate:,.0f} trajectories/s; "
        f"end to end p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    )
    print(f"  CPU-us per trajectory: {costs}, together {total:.1f}; ceiling on 2 cores {2e6 / total:,.0f}/s")
    print(f"  cores used by others meanwhile: {meter.foreign:.2f}")
    return sync not in TARGETS or met("trajectories/s", rate, TARGETS[sync], meter.foreign)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--window", type=int, default=64, help="publishes under way at once")
    parser.add_argument("--backlog", type=int, default=256, help="groups the producer may be ahead of the consumer")
    parser.add_argument("--batch", type=int, default=64, help="messages the consumer asks for")
    parser.add_argument("--rate", type=float, default=100.0, help="groups/s of the latency run")
    parser.add_argument("--check", action="store_true", help="the consumer also checks every trajectory")
    parser.add_argument("--sync", nargs="+", default=["default", "always"], help="sync_interval of the server's store")
    parser.add_argument("--directory", help="where the store lies; default: the directory for temporary files")
    options = parser.parse_args()
    good, rate = True, options.rate
    for sync in options.sync:
        options.rate = None
        good = measure(sync, options) and good
        options.rate = rate
        measure(sync, options)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
