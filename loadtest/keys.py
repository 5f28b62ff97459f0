"""Measures the cost of API keys, and the effect of wrong keys on users with valid ones: one scheduler, real NATS and
Valkey.

    python -m loadtest.keys [--seconds 10] [--json FILE]

A good user sends 200 GET /v1/jobs a second, evenly, alone; then again while another process sends 1,000 requests a
second with wrong keys on 20 connections, half of them broken (never looked up), half well-formed, and waits for no
answer. Targets: p99 < 50 ms, and under attack less than twice what it was alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import numpy as np
import uvloop

from loadtest.support.machine import Meter, keep, verdict
from loadtest.support.open_loop import Latencies, open_loop
from loadtest.support.processes import own_scheduler, own_servers
from opentinker.shared.security.key_text import new_key

GOOD_PER_S, BAD_PER_S, CONNECTIONS = 200, 1000, 20
WHOLE, WEAK = 0.95, 3
"""So much of the attack must have been sent; else the attacker's exit status."""
P99_MS, WORSE = 50.0, 2.0
WARM_S = 2.0


async def good(url: str, key: str, seconds: float) -> dict[str, float]:
    """Return quantiles of requests that come evenly, in seconds from when each was due."""
    taken = Latencies()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

        async def ask(_: int) -> None:
            async with session.get(f"{url}/v1/jobs?limit=10") as response:
                await response.read()
                assert response.status == 200, response.status

        await open_loop(np.arange(int(GOOD_PER_S * seconds)) / GOOD_PER_S, ask, taken)
    assert not taken.errors, taken.errors
    return taken.summary()


async def bad(port: int, seconds: float) -> float:
    """So many wrong keys a second, whether they are answered or not; says what was answered, and gives how many were
    sent a second. On bare sockets, to take little of the machine."""
    answers: Counter[str] = Counter()
    sent = 0

    async def listens(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                answers[head.split(b" ", 2)[1].decode()] += 1
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))

    async def connection(number: int) -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        listening = asyncio.create_task(listens(reader))
        began = time.perf_counter()
        for n in range(int(BAD_PER_S * seconds / CONNECTIONS)):
            await asyncio.sleep(began + (n + number / CONNECTIONS) * CONNECTIONS / BAD_PER_S - time.perf_counter())
            key = new_key("local") if n % 2 else new_key("local")[:-1] + "-"
            if writer.is_closing():
                break
            writer.write(f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            sent += 1
        listening.cancel()
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(connection(number) for number in range(CONNECTIONS)))
    rate = sent / (time.perf_counter() - began)
    print(f"wrong keys: {rate:,.0f}/s sent, answered by status {dict(answers)}", flush=True)
    return rate


async def measure(port: int, key: str, seconds: float, pids: dict[str, int], json: Path | None) -> bool:
    url = f"http://127.0.0.1:{port}"
    await good(url, key, WARM_S)
    found, rates, whole = [], [], False
    for attacked in (False, True):
        attacker = None
        if attacked:
            argv = [sys.executable, "-m", "loadtest.keys", "--attack", str(port), "--seconds", str(seconds + 1.0)]
            attacker = await asyncio.create_subprocess_exec(*argv)
            await asyncio.sleep(1.0)  # it starts
        meter = Meter(pids | ({} if attacker is None else {"attacker": attacker.pid}))
        taken = await good(url, key, seconds)
        meter.stop()
        if attacker is not None:
            status = await attacker.wait()
            assert status in (0, WEAK)
            whole = status == 0
        found.append(1000 * taken["p99"])
        rates.append(taken["count"] / meter.seconds)
        cpu = ", ".join(f"{name} {used / meter.seconds:.2f}" for name, used in meter.used.items())
        print(
            f"{'under attack' if attacked else 'alone'}: {rates[-1]:.0f} GET/s, "
            f"p50 {1000 * taken['p50']:.1f} ms, p99 {found[-1]:.1f} ms; cores: {cpu}, others {meter.foreign:.2f}"
        )
    alone, attacked_ms = found
    verdicts = [
        verdict(f"p99 < {P99_MS:.0f} ms", alone < P99_MS, meter.foreign),
        verdict(f"< {WORSE:.0f}x under attack", attacked_ms < WORSE * alone, meter.foreign),
        verdict(f"{BAD_PER_S} wrong keys a second meanwhile", whole, meter.foreign),
    ]
    figures = {"reads_per_s": rates[0], "p99_s": alone / 1000, "attacked_p99_s": attacked_ms / 1000}
    keep(json, figures | {"attack_was_whole": float(whole)})
    return all(verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--attack", type=int, metavar="PORT", help="be the other process")
    arguments = parser.parse_args()
    if arguments.attack is not None:
        rate = uvloop.run(bad(arguments.attack, arguments.seconds))
        sys.exit(0 if rate >= WHOLE * BAD_PER_S else WEAK)
    with own_servers() as (servers, directory), own_scheduler(servers, directory) as (pid, key, port):
        pids = {"scheduler": pid, "client": os.getpid()}
        done = uvloop.run(_reached(port)) and uvloop.run(measure(port, key, arguments.seconds, pids, arguments.json))
    sys.exit(0 if done else 1)


async def _reached(port: int) -> bool:
    for _ in range(600):
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            return True
        except OSError:
            await asyncio.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
