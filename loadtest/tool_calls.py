"""Measures a call of the python tool in an env worker, from the parsed call to the message that answers it.

    python -m loadtest.tool_calls [--calls 300] [--backend monty] [--backend sandbox]

No servers and no model: one episode's calls, one after the other, of a program that computes and prints, once the first
has warmed everything up. Prints p50 and p99 and the time to the first result; exit status 1 if a median misses its aim,
which is that of calls without a pause. After one, as while a policy speaks and nobody else does, a call takes longer by
what it takes to wake processors and processes up: that is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import Any

import numpy as np
import uvloop

from loadtest.support.machine import Meter, verdict
from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.envs.tools import ToolTurns
from opentinker.shared.config import Settings
from opentinker.shared.types.core import StopReason, ToolCall
from opentinker.shared.types.env_protocol import SeatAction

PROGRAM = "total = sum(n * n for n in range(100))\nprint('total', total)\ntotal / 7"
ANSWER = "total 328350\n46907.142857142855"
PAUSES_S = (0.0, 0.02)
AIMS_MS = {"monty": 1.0, "sandbox": 10.0}


async def measure(backend: str, calls: int) -> bool:
    shop = ToolFactory(Settings())
    began = time.perf_counter()
    tools = await shop.open("load", [{"type": "python", "backend": backend}])
    turns = ToolTurns[SeatAction](tools.offered, most=len(PAUSES_S) * calls + 2)

    async def call() -> None:
        asked: dict[str, Any] = {"code": PROGRAM}
        said = [ToolCall(id="c", name="python", arguments=asked)]
        again = await turns.take([SeatAction(text="", stop=StopReason.EOS, tool_calls=said)], False)
        (message,) = again[""]
        assert message.text.strip() == ANSWER, message.text

    try:
        await call()
        first_s = time.perf_counter() - began
        meter = Meter({"env-worker": os.getpid()})
        took_ms: dict[float, list[float]] = {pause: [] for pause in PAUSES_S}
        for pause, took in took_ms.items():
            for _ in range(calls):
                await asyncio.sleep(pause)
                started = time.perf_counter()
                await call()
                took.append(1e3 * (time.perf_counter() - started))
        meter.stop()
    finally:
        await tools.close()
        await shop.close()
    p50, p99 = np.percentile(took_ms[PAUSES_S[0]], [50, 99])
    rested = np.median(took_ms[PAUSES_S[1]])
    print(f"{backend}: p50 {p50:.2f} ms, p99 {p99:.2f} ms; after {1e3 * PAUSES_S[1]:g} ms of rest p50 {rested:.2f} ms")
    print(f"the first result after {first_s:.2f} s")
    return verdict(f"p50 <= {AIMS_MS[backend]:g} ms", bool(p50 <= AIMS_MS[backend]), meter.foreign)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--backend", action="append", choices=sorted(AIMS_MS), help="default: both")
    options = parser.parse_args()
    results = [uvloop.run(measure(backend, options.calls)) for backend in options.backend or AIMS_MS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
