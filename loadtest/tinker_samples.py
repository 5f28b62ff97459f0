"""Measures how samples of some tenants are delayed by a flood of another's, through the Tinker API.

    python -m loadtest.tinker_samples [--requests 30] [--places 16] [--seconds 0.2]

Starts all services as processes, with one rollout worker that draws `--places` samples at a time. Its engine is
simulated and takes `--seconds` for a sample. Three tenants ask for one sample at a time, first alone, then beside a
fourth that has 64 requests of eight samples in progress at any time.

Exit status 1 if the 95th percentile of the three with the flood is more than 1.5 times that without it.
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

from loadtest.support.machine import Others, verdict
from loadtest.support.tinker_client import TinkerClient, timed
from opentinker.client import AsyncClient
from opentinker.shared.security.key_text import new_key, write_key
from opentinker.shared.spec import parse_spec
from tests.support.cluster import Cluster

NOISY = 1.5
TOKENS = 10
FLOOD, SAMPLES = 64, 8


class Sampler:
    """A client of a tenant of its own that samples from the base."""

    def __init__(self, client: TinkerClient, id: str) -> None:
        self._client, self._id = client, id

    async def draw(self, samples: int) -> None:
        body = {
            "sampling_session_id": self._id,
            "seq_id": self._client.number(),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "num_samples": samples,
            "sampling_params": {"max_tokens": TOKENS, "stop": []},
        }
        await self._client.result(await self._client.call("asample", body))


async def sampler(cluster: Cluster, http: aiohttp.ClientSession, base: str) -> Sampler:
    key = await cluster.client.create_key("member", name="loadtest", tenant=f"tenant-{uuid.uuid4().hex[:8]}")
    client = TinkerClient(http, cluster.client.url, key["key"])
    await client.open()
    made = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": base}
    return Sampler(client, (await client.call("create_sampling_session", made))["sampling_session_id"])


async def measure(cluster: Cluster, base: str, requests: int) -> tuple[float, float]:
    """Return the 95th percentiles in seconds without and with the flood."""

    async def few(one: Sampler) -> list[float]:
        return [await timed(one.draw(1)) for _ in range(requests)]

    async def flood(one: Sampler) -> None:
        while True:
            await one.draw(SAMPLES)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        others = [await sampler(cluster, http, base) for _ in range(3)]
        loud = await sampler(cluster, http, base)
        await asyncio.gather(*(one.draw(1) for one in (*others, loud)))
        found = []
        for name, is_noisy in (("alone", False), ("beside a flood", True)):
            floods = [asyncio.create_task(flood(loud)) for _ in range(FLOOD if is_noisy else 0)]
            await asyncio.sleep(2.0 if is_noisy else 0.0)
            took = [one for some in await asyncio.gather(*map(few, others)) for one in some]
            if failed := [task for task in floods if task.done()]:
                failed[0].result()
            for task in floods:
                task.cancel()
            found.append(quantiles(took, n=20)[-1])
            print(f"{name:16}{1e3 * median(took):8.0f} ms in the median{1e3 * found[-1]:8.0f} ms 95th percentile")
        return found[0], found[1]


async def run(options: argparse.Namespace) -> bool:
    from examples.models.make_tiny import make_tiny

    others = Others()
    with tempfile.TemporaryDirectory() as directory:
        base = str(make_tiny(Path(directory, "tiny")))
        key, file = new_key("local"), Path(directory, "key")
        write_key(file, key)
        made = Cluster(Path(directory, "cluster"), bank_jobs=1, auth=True, admin_key_file=file)
        made.client = AsyncClient(made.client.url, api_key=key, wait_s=60.0)
        spec: dict[str, Any] = {
            "name": "tinker",
            "kind": "tinker",
            "model": {"base": base},
            "rollout": {"engine": "toy", "toy": {"seconds_per_token": options.seconds / TOKENS}},
            "tinker": {"open_to": ["*"], "max_concurrent": options.places},
        }
        async with made as cluster:
            await cluster.ready()
            await cluster.runs(await cluster.submit(parse_spec(spec)))
            quiet, noisy = await measure(cluster, base, options.requests)
    foreign = others.stop()
    return verdict(f"<= {NOISY} times beside a flood of samples ({noisy / quiet:.2f})", noisy / quiet <= NOISY, foreign)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30, help="of each of the three tenants")
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a sample")
    sys.exit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
