"""A service process for tests: `python tests/minimal_service.py MODE`."""

from __future__ import annotations

import asyncio
import sys

from opentinker.shared.leasing import LeasedWorker
from opentinker.shared.service import Context, main
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Lease, Pool

MODE = sys.argv.pop(1)


async def serve(ctx: Context) -> None:
    match MODE:
        case "raises":
            raise RuntimeError("planted failure")
        case "returns":
            return
        case "leased":
            await LeasedWorker(ctx, Pool.ROLLOUT, work).serve()
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


if __name__ == "__main__":
    main("minimal", serve)
