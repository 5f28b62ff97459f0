"""Measures how soon a client of the Tinker API has its first model and its first step.

    python -m loadtest.first_step [--model DIR] [--clients 5]

Starts `opentinker up --shared-jobs 4` in an empty directory and submits examples/tinker/server.toml as soon as the
server responds; a client that speaks the wire format then creates a model and sends a forward_backward and an
optim_step. The cold time is from the start of `up` to the answer of that step. Then `--clients` others come one after
another, when the server's engine is running too; the warm time of each is from its session to the answer of its step.

Exit status 1 if the cold time is 15 s or more, or the median of the warm ones 1 s or more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np

from examples.models.make_tiny import make_tiny
from loadtest.support.machine import Others, verdict
from loadtest.support.target import ROOT, Target, target
from loadtest.support.tinker_client import TinkerClient, cross_entropy, timed
from opentinker.shared.spec import parse_spec

COLD_S, WARM_S = 15.0, 1.0
ENGINE_S = 300.0
ROW = np.arange(3, 35, dtype=np.int32)


async def first_step(http: aiohttp.ClientSession, at: Target, base: str) -> None:
    """Create a model and train it one step."""
    client = TinkerClient(http, at.url, at.key or "")
    await client.create(base)
    await client.step(cross_entropy([ROW]))


async def first_sample(http: aiohttp.ClientSession, at: Target, base: str) -> None:
    """Have a token drawn, for which the server's engine must run."""
    client = TinkerClient(http, at.url, at.key or "")
    await client.open()
    asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = (await client.call("create_sampling_session", asked))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ROW.tolist()}]}
    params = {"max_tokens": 1, "temperature": 1.0}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": params, "num_samples": 1}
    async with asyncio.timeout(ENGINE_S):
        await client.result(await client.call("asample", asked))


async def measure(base: str, clients: int) -> tuple[float, list[float]]:
    """Return the cold time and the warm ones."""
    spec = tomllib.loads((ROOT / "examples" / "tinker" / "server.toml").read_text())
    spec["model"]["base"] = base
    began = time.perf_counter()
    up = target(None, shared_jobs=4, reference=1, PRELOAD="true", ENV_MODULES="false")
    async with up as at, aiohttp.ClientSession() as http:
        await at.client.submit(parse_spec(spec))
        await first_step(http, at, base)
        cold = time.perf_counter() - began
        await first_sample(http, at, base)
        return cold, [await timed(first_step(http, at, base)) for _ in range(clients)]


async def run(options: argparse.Namespace) -> bool:
    others = Others()
    with tempfile.TemporaryDirectory() as directory:
        base = options.model or make_tiny(Path(directory, "tiny"), norm_scale=3.0)
        cold, warm = await measure(str(base), options.clients)
    foreign = others.stop()
    print(f"first model and first step: {cold:.1f} s after the start of `up`, {median(warm):.2f} s on a running server")
    good = [
        verdict(f"< {COLD_S:g} s from the start of `up` ({cold:.1f})", cold < COLD_S, foreign),
        verdict(f"< {WARM_S:g} s on a running server ({median(warm):.2f})", median(warm) < WARM_S, foreign),
    ]
    return all(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model; without it the tiny one of the examples")
    parser.add_argument("--clients", type=int, default=5, help="clients on the running server")
    options = parser.parse_args()
    if options.clients < 1:
        parser.error("--clients must be 1 or more")
    sys.exit(not asyncio.run(run(options)))


if __name__ == "__main__":
    main()
