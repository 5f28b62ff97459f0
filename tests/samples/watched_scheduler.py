"""A scheduler process for tests whose event loop is watched: `python tests/samples/watched_scheduler.py FILE`.

FILE holds, after its end, the longest processor time that one callback had the loop for, what it was, and how many
had it for longer than STALL_S. Processor
time: how long a busy machine let the thread wait says nothing about it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio import events
from pathlib import Path
from typing import Any

from opentinker.services.scheduler.service import serve
from opentinker.shared.runtime import service
from opentinker.shared.settings_sources import load_settings

worst: dict[str, Any] = {"seconds": 0.0, "what": "", "callbacks": 0, "stalls": 0}
STALL_S = 0.1
run_one: Any = events.Handle._run


def watched(handle: Any) -> None:
    began = time.thread_time()
    run_one(handle)
    took = time.thread_time() - began
    worst["callbacks"] += 1
    worst["stalls"] += took > STALL_S and worst["watching"]
    if took > worst["seconds"] and worst["watching"]:
        worst.update(seconds=took, what=repr(handle)[:500])


async def life() -> None:
    # what is done once, when it starts, holds up nobody
    asyncio.get_running_loop().call_later(3.0, lambda: worst.update(watching=True))
    await service.run("scheduler", serve, load_settings(), os.environ)


if __name__ == "__main__":
    worst["watching"] = False
    setattr(events.Handle, "_run", watched)  # noqa: B010
    try:
        asyncio.run(life())
    finally:
        Path(sys.argv[1]).write_text(json.dumps(worst))
