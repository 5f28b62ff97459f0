"""Measures the extra time of a request through an episode's endpoint, which captures tokens, over a server that answers
immediately.

    python -m loadtest.capture [--requests 300] [--json FILE]

One agent asks one request after the other in each dialect, with the latest MESSAGES messages of a conversation, so that
every request begins a stream and is compared with all earlier ones; the policy answers at once. The other server is as
bare as aiohttp makes one: it reads the body and writes the same answer. Client, agent and servers share a process, so
that the difference is the endpoint's. Prints p50 of both and the processor time; exit status 1 if the difference is
above the target of 2 ms in a dialect.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import uvloop
from aiohttp import web

from loadtest.support.machine import Meter, keep, verdict
from opentinker.envs.agent import AgentEnvironment, Result
from opentinker.envs.base import Action, EnvironmentConfig, Opening, Step
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import Policy

MESSAGES, CHARACTERS, SAMPLED = 20, 400, 50
"""Of the conversation, of each message, and tokens of an answer."""
TARGET_MS = 2.0
FIELDS = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
"""Where the conversation stands, by dialect."""
IDS, LOGPROBS = list(range(SAMPLED)), [-0.5] * SAMPLED
ANSWER = Action(text="x" * SAMPLED, stop=StopReason.EOS, turn=0, ids=IDS, logprobs=LOGPROBS, prompt_tokens=2000)


class Asker(AgentEnvironment):
    """Asks `requests` times in a dialect, and notes how long each took."""

    def __init__(self, route: str, stream: bool, requests: int) -> None:
        super().__init__(EnvironmentConfig())
        self.policy = Policy(model="m", context_length=10**6)
        self.route, self.stream, self.requests = route, stream, requests
        self.took_ms: list[float] = []
        self.cpu_ms = 0.0
        self.bodies: list[bytes] = []
        self.answer = b""

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        said = [{"role": ("user", "assistant")[n % 2], "content": "x" * CHARACTERS} for n in range(MESSAGES - 1)]
        for n in range(self.requests):
            self.bodies.append(orjson.dumps({"model": "m", FIELDS[self.route]: said, "stream": self.stream}))
            said += [{"role": "assistant", "content": ANSWER.text}, {"role": "user", "content": f"{n}: again"}]
            del said[:2]
        self.took_ms, self.cpu_ms, self.answer = await asked(f"{base_url}/{self.route}", self.bodies)
        return Result(reward=1.0)


async def asked(url: str, bodies: list[bytes]) -> tuple[list[float], float, bytes]:
    """Milliseconds of each request, of processor time for one, and the last answer."""
    took = []
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        cpu = time.process_time()
        for body in bodies:
            began = time.perf_counter()
            async with session.post(url, data=body) as response:
                answer = await response.read()
                assert response.status == 200, answer
            took.append(1e3 * (time.perf_counter() - began))
        cpu = time.process_time() - cpu
    return took, 1e3 * cpu / len(bodies), answer


async def captured(asker: Asker) -> None:
    step: Opening | Step = await asker.open(0, 0)
    while not (isinstance(step, Step) and step.done):
        step = await asker.step(ANSWER)
    await asker.close()


async def bare(asker: Asker) -> tuple[list[float], float]:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=asker.answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 25)
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        took, cpu, _ = await asked(f"http://127.0.0.1:{runner.addresses[0][1]}/{asker.route}", asker.bodies)
    finally:
        await runner.cleanup()
    return took, cpu


async def measure(requests: int) -> tuple[bool, dict[str, float]]:
    meter, added_ms = Meter({"agent": os.getpid()}), {}
    for route in FIELDS:
        for stream in (False, True):
            asker = Asker(route, stream, requests)
            await captured(asker)
            plain, cpu = await bare(asker)
            p50, base = float(np.median(asker.took_ms)), float(np.median(plain))
            added_ms[f"{route}{', stream' * stream}"] = p50 - base
            print(f"{route:17} {'stream' if stream else 'whole':7} p50 {p50:.2f} ms, bare {base:.2f} ms: "
                  f"adds {p50 - base:.2f} ms, of processor time {asker.cpu_ms - cpu:.2f} ms")  # fmt: skip
    meter.stop()
    good = max(added_ms.values()) <= TARGET_MS
    return verdict(f"adds <= {TARGET_MS:g} ms to p50", good, meter.foreign), added_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    good, added_ms = uvloop.run(measure(options.requests))
    keep(options.json, added_ms)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
