"""Measures the Tinker API over HTTP, NATS and Redis: round trips, cost of training, and clients side by side.

    python -m loadtest.tinker [--model DIR] [--rows 16] [--tokens 128] [--steps 6] [--trips 40] [--slots 8]

Starts all services as processes, with a shared trainer and a simulated engine, and clients that speak the wire format.
A round trip is a forward_backward of one datum of two tokens and an optim_step, both sent at once; what the same two
commands take in a bank in this process is subtracted. The cost is the processor time of all services per 1,000
trained tokens. Four clients send a quarter of the rows each. A noisy neighbour sends requests with four times the rows,
two at a time, while three others, of another tenant each, send the rows as usual.

Exit status 1 if a round trip takes more than 10 ms (median) above its computation, 1,000 tokens cost more than 0.40 CPU
seconds, four clients reach less than 0.95 of one, or the neighbour raises the others' 95th percentile above 1.5 times
what they have without it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import uuid
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import numpy as np

from loadtest.support.machine import Meter, Others, verdict
from loadtest.support.tinker_client import Ids, TinkerClient, cross_entropy, timed
from opentinker.client import AsyncClient
from opentinker.shared.security.key_text import new_key, write_key
from opentinker.shared.spec import parse_spec
from tests.support.cluster import Cluster

TRIP_MS, COST_S, RATIO, NOISY = 10.0, 0.40, 0.95, 1.5
CLIENTS = 4
VOCABULARY = 60


def rows_of(seed: int, rows: int, tokens: int) -> list[Ids]:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, tokens, dtype=np.int32) for _ in range(rows)]


class Site:
    """A cluster with a Tinker job of one base."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession, base: str) -> None:
        self.cluster, self.http, self.base = cluster, http, base

    async def client(self, seed: int = 0) -> TinkerClient:
        """Return a client of a tenant of its own."""
        key = (
            await self.cluster.client.create_key("member", name="loadtest", tenant=f"tenant-{uuid.uuid4().hex[:8]}")
        )["key"]
        made = TinkerClient(self.http, self.cluster.client.url, key)
        await made.create(self.base, seed=seed)
        return made

    def meter(self) -> Meter:
        return Meter({name: process.pid for name, process in self.cluster.processes.items()})


async def trip_ms(site: Site, trips: int) -> float:
    """Return the median."""
    client, body = await site.client(), cross_entropy(rows_of(0, 1, 3))
    took = [await timed(client.step(body)) for _ in range(trips + 5)]
    return 1e3 * median(took[5:])


async def computation_ms(base: str, store: Path, trips: int) -> float:
    """Return what the two commands take in a bank of this process: the median."""
    from opentinker.services.trainer.bank.adamw import AdamSettings
    from opentinker.services.trainer.bank.adapter_bank import AdapterBank
    from opentinker.services.trainer.bank.bank_loop import BankLoop
    from opentinker.services.trainer.bank.base_model import BaseModel
    from opentinker.services.trainer.bank.pass_part import PassOptions
    from opentinker.services.trainer.tinker.losses import Columns, find_loss, units_of
    from opentinker.shared.spec import LoraSpec

    (ids,) = rows_of(0, 1, 3)
    none, ones = np.empty(0, np.float32), np.ones(len(ids) - 1, np.float32)
    units = units_of([Columns(ids[:-1], ids[1:], 1, ones, none, none)], find_loss("cross_entropy", {}), most=0)
    async with BankLoop(AdapterBank(BaseModel(base), store, slots=2)) as loop:
        await loop.create("a", "a", LoraSpec(rank=16), seed=0)

        async def step() -> None:
            forward = loop.run_units("a", "a", units, PassOptions())
            await asyncio.gather(forward, loop.optim_step("a", "a", AdamSettings(lr=1e-4)))

        took = [await timed(step()) for _ in range(trips + 5)]
    return 1e3 * median(took[5:])


async def speed(site: Site, clients: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second, and seconds of processor time of all services per 1,000 tokens."""
    rows = options.rows // clients
    made = [await site.client(seed) for seed in range(clients)]
    bodies = [cross_entropy(rows_of(seed, rows, options.tokens + 1)) for seed in range(clients)]
    await asyncio.gather(*(client.step(body) for client, body in zip(made, bodies, strict=True)))

    async def train(client: TinkerClient, body: bytes) -> None:
        for _ in range(options.steps):
            await client.step(body)

    meter = site.meter()
    await asyncio.gather(*(train(client, body) for client, body in zip(made, bodies, strict=True)))
    meter.stop()
    tokens = clients * rows * options.tokens * options.steps
    return tokens / meter.seconds, sum(meter.used.values()) / tokens * 1e3


async def percentile_ms(site: Site, options: argparse.Namespace, *, noisy: bool) -> float:
    """Return the 95th percentile of the steps of three clients; `noisy`: beside one that floods."""
    body = cross_entropy(rows_of(1, options.rows, options.tokens + 1))
    others = [await site.client(seed) for seed in range(3)]

    async def few(client: TinkerClient) -> list[float]:
        return [await timed(client.step(body)) for _ in range(2 * options.steps)]

    async def flood(client: TinkerClient) -> None:
        large = cross_entropy(rows_of(2, 4 * options.rows, options.tokens + 1))
        while True:
            await asyncio.gather(*(client.step(large) for _ in range(2)))

    neighbour = asyncio.create_task(flood(await site.client(9))) if noisy else None
    found = await asyncio.gather(*(few(client) for client in others))
    if neighbour is not None:
        neighbour.cancel()
    return 1e3 * quantiles([one for some in found for one in some], n=20)[-1]


async def measure(site: Site, options: argparse.Namespace, store: Path) -> dict[str, Any]:
    trip, computed = await trip_ms(site, options.trips), await computation_ms(site.base, store, options.trips)
    one, four = await speed(site, 1, options), await speed(site, CLIENTS, options)
    quiet, noisy = [await percentile_ms(site, options, noisy=flag) for flag in (False, True)]
    print(f"round trip {trip:.1f} ms, of which computation {computed:.1f} ms")
    for name, (rate, cost) in (("one client", one), (f"{CLIENTS} clients", four)):
        print(f"{name:12}{rate:8,.0f} tokens/s{cost:8.3f} CPU s per 1,000 tokens")
    print(f"3 clients: 95th percentile of a step {quiet:.0f} ms, {noisy:.0f} ms beside one that floods")
    return {"trip": trip - computed, "cost": one[1], "ratio": four[0] / one[0], "noisy": noisy / quiet}


async def run(options: argparse.Namespace) -> bool:
    from examples.models.make_tiny import make_tiny

    others = Others()
    with tempfile.TemporaryDirectory() as directory:
        base = str(options.model or make_tiny(Path(directory, "tiny")))
        key, file = new_key("local"), Path(directory, "key")
        write_key(file, key)
        made = Cluster(Path(directory, "cluster"), bank_jobs=options.slots, auth=True, admin_key_file=file)
        made.client = AsyncClient(made.client.url, api_key=key, wait_s=60.0)
        async with made as cluster, aiohttp.ClientSession() as http:
            await cluster.ready()
            tinker = {"kind": "tinker", "rollout": {"engine": "toy"}, "tinker": {"open_to": ["*"]}}
            spec = {"name": "tinker", "model": {"base": base}, **tinker}
            await cluster.runs(await cluster.submit(parse_spec(spec)))
            found = await measure(Site(cluster, http, base), options, Path(directory, "bank"))
    foreign = others.stop()
    good = [
        verdict(f"<= {TRIP_MS:g} ms above the computation ({found['trip']:.1f})", found["trip"] <= TRIP_MS, foreign),
        verdict(f"<= {COST_S} CPU s per 1,000 tokens ({found['cost']:.3f})", found["cost"] <= COST_S, foreign),
        verdict(f">= {RATIO} of one client with four ({found['ratio']:.2f})", found["ratio"] >= RATIO, foreign),
        verdict(f"<= {NOISY} times beside a flood ({found['noisy']:.2f})", found["noisy"] <= NOISY, foreign),
    ]
    return all(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    for name, default in (("rows", 16), ("tokens", 128), ("steps", 6), ("trips", 40), ("slots", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sys.exit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
