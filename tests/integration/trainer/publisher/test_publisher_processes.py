"""The publisher and rollout worker processes in a real gloo group: killed, stopped, late."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.messaging.subjects import SWAP
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import Lease, Pool, WeightVersion
from opentinker.shared.types.swap import SwapCommand
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import soon, until
from tests.integration.trainer.publisher.published_weights import BRIEF_S, LARGE, REAL, FakeWorker, training
from tests.support.cluster import PYTHONPATH, toy_model
from tests.support.cluster_process import Process
from tests.support.factories import version
from tests.support.scheduling import new_job, running
from tests.support.service_forks import fork_server

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Fleet:
    """Rollout worker processes with toy engines, leased to the job: forks, which have imported torch before their first
    heartbeat, as with `preload`. Of those called `brief` a hang is seen soon."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.processes: dict[str, Process] = {}

    async def start(self, *names: str) -> None:
        """Those that do not run; returns when all are ready for the trainer."""
        missing = [n for n in names if n not in self.processes or self.processes[n].popen is None]
        for name in missing:
            self._launch(name)
        for name in missing:
            await until(functools.partial(self._info, name))
            info = await self._info(name)
            assert info is not None
            lease = Lease(job=REAL, worker=name, incarnation=info.incarnation, epoch=1, pool=Pool.ROLLOUT)
            await self.ctx.store.grant(lease)
        for name in names:
            await self.address(name)

    def _launch(self, name: str) -> None:
        settings = ("nats_url", "redis_url", "data_dir", "swap_timeout_s", "worker_ttl_s")
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
            "OPENTINKER_WORKER_ID": name,
            "OPENTINKER_PRELOAD": "false",
            "OPENTINKER_HEARTBEAT_S": "0.2",
            **{f"OPENTINKER_{key.upper()}": str(getattr(self.ctx.settings, key)) for key in settings},
            **({"OPENTINKER_WORKER_TTL_S": str(BRIEF_S)} if name == "brief" else {}),
        }
        log = self.ctx.settings.data_dir / f"{name}.log"
        server = functools.partial(fork_server, "torch")
        self.processes[name] = Process(name, ["opentinker.services.rollout_worker"], env, log, server)
        self.processes[name].start()

    async def _info(self, name: str) -> WorkerInfo | None:
        pid = self.processes[name].pid
        found = [w for w in await self.ctx.store.workers() if w.id == name and w.pid == pid]
        return found[0] if found else None

    async def address(self, name: str) -> str:
        """On SWAP, as soon as it listens there."""
        await until(lambda: self._info(name), lambda info: info is not None and info.status == "ready")
        info = await self._info(name)
        assert info is not None
        return info.address

    async def have(self, wanted: WeightVersion, *names: str) -> None:
        """Until the workers themselves say that they have the version."""
        for name in names:
            await until(functools.partial(self._has, await self.address(name), wanted))

    async def _has(self, address: str, wanted: WeightVersion) -> bool:
        ping = SwapCommand(job=REAL, epoch=1, action="ping", generation=0)
        try:
            return (await self.ctx.bus.request(SWAP, ping, 1.0, worker=address)).version == wanted
        except NoReply:
            return False

    async def asked(self, name: str, action: str) -> Callable[[], Awaitable[None]]:
        """Gives a wait for the next such command to the worker."""
        seen = asyncio.Event()

        async def look(message: Any) -> None:
            if action.encode() in message.data:
                seen.set()

        subscription = await self.ctx.bus.nc.subscribe(SWAP.at(worker=await self.address(name)), cb=look)
        await self.ctx.bus.nc.flush()

        async def wait() -> None:
            await soon(seen.wait())
            await subscription.unsubscribe()  # else the address would still be served when the worker is dead
            await self.ctx.bus.nc.flush()

        return wait

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self.processes[name]
        assert process.popen is not None
        process.signal(number)
        if number == signal.SIGKILL:
            process.popen.wait()
            process.wanted = False
            process.look()

    def end(self) -> None:
        for name, process in self.processes.items():
            if process.popen is not None:
                self.signal(name, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(ctx: Context) -> AsyncIterator[Fleet]:
    model = await asyncio.to_thread(toy_model, ctx.settings.data_dir / "model")
    await new_job(ctx.store, REAL, model={"base": str(model)})
    fleet = Fleet(ctx)
    try:
        yield fleet
    finally:
        fleet.end()


async def test_worker_killed_between_swaps_holds_up_nobody_and_its_successor_joins(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a", "b")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, 1000)
        await fleet.have(version(1), "a", "b")
        fleet.signal("b", signal.SIGKILL)
        killed = time.monotonic()
        await trainer.offer(2, 1000)
        await fleet.have(version(2), "a")
        await trainer.serves()
        print(f"killed between swaps: {trainer.served[version(2)] - killed:.2f} s")
        await trainer.serve(3, 1000)  # its heartbeat has not run out yet
        await fleet.start("b")
        await fleet.have(version(3), "a", "b")
        assert trainer.publisher.workers == 2


async def test_worker_killed_during_a_transfer_holds_up_nobody(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a", "b")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, LARGE)
        await fleet.have(version(1), "a", "b")
        sending = await fleet.asked("b", "receive")
        fleet.signal("b", signal.SIGSTOP)
        await trainer.offer(2, LARGE)
        await sending()  # and stands still: it does not read
        fleet.signal("b", signal.SIGKILL)
        killed = time.monotonic()
        await fleet.have(version(2), "a")
        await trainer.serves()
        print(f"killed during a transfer: {trainer.served[version(2)] - killed:.2f} s")


async def test_worker_that_dies_while_it_joins_holds_up_nobody(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a")
    died: list[float] = []

    async def dies(command: SwapCommand) -> None:
        await doomed.stop_serving()
        died.append(time.monotonic())
        await asyncio.Event().wait()

    doomed = FakeWorker(ctx, "doomed", dies, REAL)
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, 1000)
        await fleet.have(version(1), "a")
        async with running(doomed.live()):
            await until(lambda: died)
            await trainer.offer(2, 1000)
            await fleet.have(version(2), "a")
            await trainer.serves()
        print(f"killed while it joins: {trainer.served[version(2)] - died[0]:.2f} s")


@pytest.mark.parametrize("values", [1000, LARGE], ids=["buffered", "large"])
async def test_worker_that_hangs_is_left_out_until_it_goes_on(ctx: Context, fleet: Fleet, values: int) -> None:
    await fleet.start("a", "brief")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, values)
        await fleet.have(version(1), "a", "brief")
        fleet.signal("brief", signal.SIGSTOP)
        stopped = time.monotonic()
        await trainer.serve(2, values)
        print(f"hangs: {trainer.served[version(2)] - stopped:.2f} s")
        await fleet.have(version(2), "a")
        await trainer.serve(3, values)
        await fleet.have(version(3), "a")
        fleet.signal("brief", signal.SIGCONT)
        await fleet.have(version(3), "a", "brief")
