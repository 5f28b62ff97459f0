"""A service process for tests: `python tests/samples/minimal_service.py MODE`."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context, main
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Lease, Pool

MODE = sys.argv.pop(1)
PARENT = """
import subprocess, time
subprocess.Popen(["sleep", "3600"], start_new_session=True)
time.sleep(3600)
"""


async def serve(ctx: Context) -> None:
    match MODE:
        case "raises":
            raise RuntimeError("planted failure")
        case "returns":
            return
        case "forgets":
            for error in (socket.gaierror("unknown name"), ValueError("planted")):
                asyncio.get_running_loop().create_future().set_exception(error)
            gc.collect()
            ctx.log.info("forgotten")
        case "leased":
            await LeasedWorker(ctx, Pool.ROLLOUT, work).serve()
            return
        case "loads":
            await LeasedWorker(ctx, Pool.TRAINER, load).serve()
            return
    ctx.ready()
    await ctx.stopping.wait()
    if MODE == "drains":
        await asyncio.sleep(0.3)
        ctx.log.info("drained")
    elif MODE == "hangs":
        await asyncio.Event().wait()


async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    await worker.status("ready", job=lease.job, epoch=lease.epoch)
    await asyncio.Event().wait()


async def load(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    """A load that ends in an hour and cannot be interrupted, with all that one may hold meanwhile."""
    child = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)  # noqa: ASYNC220
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)  # as libraries do that know no better
    place = Path(tempfile.mkdtemp(prefix="opentinker-test-"))
    (place / "part").write_text("of something")
    worker.leftovers.append(f"{place}*")
    memory = SharedMemory(create=True, size=1)
    port = listener.getsockname()[1]
    worker.ctx.log.info("held", by=lease.job, child=child.pid, port=port, place=str(place), memory=memory.name)
    await finish_uncancelled(asyncio.to_thread(threading.Event().wait, 3600))


if __name__ == "__main__":
    main("minimal", serve)
