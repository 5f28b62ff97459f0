"""A worker with a call that cannot be interrupted re-executes itself and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.reexec import below
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import Server, until
from tests.integration.shared.test_service import Process
from tests.support.listening import runs
from tests.support.scheduling import new_job


class Slot:
    """A worker process that a test leads by its leases."""

    def __init__(self, process: Process, name: str, bus: Bus, store: Store) -> None:
        self.process, self.name, self.bus, self.store = process, name, bus, store
        self.epochs = 0

    async def seen(self) -> WorkerInfo | None:
        return next((worker for worker in await self.store.workers() if worker.id == self.name), None)

    async def idle(self, *, after: str = "") -> WorkerInfo:
        """It waits for a lease, as another incarnation than `after`."""
        found: list[WorkerInfo] = []

        async def waits() -> bool:
            worker = await self.seen()
            if worker is not None and worker.status == "idle" and worker.incarnation != after:
                found.append(worker)
            return bool(found)

        await until(waits)
        return found[0]

    async def begins(self, worker: WorkerInfo) -> tuple[str, dict[str, Any]]:
        """A job whose load has begun, and what that holds."""
        job, self.epochs = await new_job(self.store, state=JobState.STARTING), self.epochs + 1
        lease = Lease(job=job, worker=self.name, pool=Pool.TRAINER, incarnation=worker.incarnation, epoch=self.epochs)
        await self.store.grant(lease)
        await self.wake()
        await until(lambda: [line for line in self.process.events("held") if line["by"] == job])
        (held,) = [line for line in self.process.events("held") if line["by"] == job]
        await until(lambda: len(below(held["child"])) == 1)
        return job, held | {"grandchild": below(held["child"])[0]}

    async def wake(self) -> None:
        await self.bus.emit(WAKE, {}, who=self.name)


@pytest.fixture
async def slot(nats_server: Server, valkey_server: Server, bus: Bus, store: Store, tmp_path: Path) -> Any:
    name = f"loads-{uuid.uuid4().hex[:8]}"
    settings = {"nats_url": nats_server.url, "redis_url": valkey_server.url, "worker_id": name}
    process = Process("loads", tmp_path / "log", **settings, cancel_grace_s="0.2", heartbeat_s="0.2")
    yield Slot(process, name, bus, store)
    for pid in below(process.popen.pid):
        os.kill(pid, signal.SIGKILL)
    process.popen.kill()
    process.popen.wait()


def has_left_nothing(held: dict[str, Any]) -> bool:
    """What multiprocessing has named was removed too."""
    gone = not runs(held["child"]) and not runs(held["grandchild"]) and refuses(held["port"])
    return gone and not Path(held["place"]).exists() and not (Path("/dev/shm") / held["memory"]).exists()


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.PAUSED])
async def test_a_worker_with_an_unwanted_load_is_freed(slot: Slot, state: JobState) -> None:
    first = await slot.idle()
    job, held = await slot.begins(first)
    await slot.store.transition(job, state)
    await slot.store.revoke(slot.name)
    await slot.wake()
    second = await slot.idle(after=first.incarnation)
    assert second.pid == first.pid == slot.process.popen.pid and slot.process.popen.poll() is None
    await until(lambda: has_left_nothing(held) and below(second.pid) == [])
    assert [line["job"] for line in slot.process.events("process_restarts")] == [job]
    _, again = await slot.begins(second)
    assert runs(again["child"])


async def test_told_to_stop_a_worker_that_cannot_let_go_ends(slot: Slot) -> None:
    first = await slot.idle()
    job, held = await slot.begins(first)
    await slot.store.transition(job, JobState.CANCELLED)
    await slot.store.revoke(slot.name)
    slot.process.stop()
    assert await slot.process.ended() == 0
    await until(lambda: has_left_nothing(held))
    assert await slot.seen() is None
