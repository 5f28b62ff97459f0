"""Too little disk: what is said before anything starts, and what the servers and those who wait for them do then."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections import namedtuple
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from opentinker.cli.machine import doctor
from opentinker.local.embedded import (
    DISK_FLOOR_BYTES,
    STORE_BYTES,
    EmbeddedServers,
    nats_health,
    shipped_conf,
    valkey_binary,
)
from opentinker.local.processes import StartError
from opentinker.local.supervisor import MISSES, Keeper
from opentinker.shared.messaging.bus import Bus, StreamFull
from opentinker.shared.messaging.subjects import GROUP, GROUPS, STREAMS, Subject
from opentinker.shared.state.store import Store
from tests.conftest import soon, until
from tests.integration.shared.test_supervisor import running
from tests.support.scheduling import new_job

Usage = namedtuple("Usage", "total used free")
BLOBS = Subject(GROUP.pattern, bytes)


class Disk:
    """Says how much is free, and counts who asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.looks = 0

    def __call__(self, free: int) -> None:
        def usage(_: Path) -> Usage:
            self.looks += 1
            return Usage(2**50, 0, free)

        self._monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@asynccontextmanager
async def supervised(
    directory: Path, *, nats: bool = True, redis: bool = True, **timing: Any
) -> AsyncIterator[tuple[EmbeddedServers, Keeper]]:
    """One embedded server, kept alive."""
    with EmbeddedServers(directory, nats=nats, redis=redis, default_ports={}) as embedded:
        children = list(embedded.children.values())
        async with running(children, state=directory / "state.json", **timing) as supervisor:
            yield embedded, supervisor.keepers[0]


def test_the_disk_that_is_asked_for_has_room_for_what_the_streams_set_aside() -> None:
    """nats-server takes three quarters of what is free, and makes no stream that sets more aside."""
    assert sum(max(0, stream.max_bytes or 0) for stream in STREAMS) <= STORE_BYTES * 3 // 4


def test_a_disk_too_small_for_a_new_store_is_said_before_anything_starts(tmp_path: Path, free: Disk) -> None:
    free(STORE_BYTES - 1)
    servers = EmbeddedServers(tmp_path, default_ports={})
    with pytest.raises(StartError, match=rf"699 MiB are free on the disk of {tmp_path}/nats.*700 MiB.*--data-dir"):
        servers.start()
    assert servers.children == {}
    with EmbeddedServers(tmp_path, nats=False, default_ports={}):
        pass  # an external NATS has its own disk


def test_a_store_that_is_there_starts_on_a_full_disk(tmp_path: Path, free: Disk) -> None:
    with EmbeddedServers(tmp_path, redis=False, default_ports={}):
        pass
    free(0)
    with EmbeddedServers(tmp_path, redis=False, default_ports={}) as servers:
        assert servers.nats_url


@pytest.mark.parametrize(("size", "result"), [(0, "bad"), (STORE_BYTES, "note"), (2 * 2**30, "ok")])
def test_doctor_says_whether_the_disk_is_enough(tmp_path: Path, free: Disk, size: int, result: str) -> None:
    free(size)
    (check,) = [check for check in doctor.examine(tmp_path) if check["what"] == "disk"]
    assert check["result"] == result and bool(check["hint"]) == (result != "ok")


async def test_a_nats_at_its_own_limit_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would not help: publishers wait until the trainer has made room."""
    conf = tmp_path / "nats.conf"
    shipped = shipped_conf("nats.conf").read_text()
    conf.write_text(shipped.replace("jetstream {", "jetstream {\n  max_file_store: 2MB"))
    monkeypatch.setattr("opentinker.local.embedded.shipped_conf", lambda _: conf)
    with EmbeddedServers(tmp_path, redis=False, default_ports={}) as servers:
        async with Bus.connect(servers.operator_url("nats"), "test") as bus:
            await bus.js.add_stream(GROUPS)
            with pytest.raises(StreamFull):
                for number in range(100):
                    await bus.publish(BLOBS, bytes(100_000), f"j/{number}", job="j")
        assert servers.children["nats"].spec.healthy()


async def test_a_full_nats_restarts_without_loss(tmp_path: Path, free: Disk) -> None:
    """No file of it may grow beyond a megabyte: it fails as on a full disk, and stays so until its restart."""
    async with (
        supervised(tmp_path, redis=False, probe_every_s=0.05) as (servers, keeper),
        Bus.connect(servers.operator_url("nats"), "test") as bus,
    ):
        await bus.ensure_streams()
        pid = keeper.child.pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        free(DISK_FLOOR_BYTES - 1)

        async def publish() -> None:
            for number in range(20):
                await bus.publish(BLOBS, bytes(100_000), f"j/{number}", job="j")

        publishing = asyncio.create_task(publish())
        await until(lambda: nats_health(servers.ports["nats"], servers.access.password("nats", "scheduler")) is False)
        looks = free.looks
        await until(lambda: free.looks > looks + 2 * MISSES)
        assert keeper.child.pid == pid and not publishing.done(), "a restart on a full disk helps nobody"
        free(DISK_FLOOR_BYTES)
        await soon(publishing)
        assert keeper.restarts >= 1
        assert await bus.count("GROUPS", GROUP.at(job="j")) == 20


async def test_a_full_valkey_keeps_what_it_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the first write that the disk refuses, and again after each start until there is room."""
    limit, wrapper = tmp_path / "limit", tmp_path / "limited-valkey"
    limit.write_text("100")  # blocks
    wrapper.write_text(
        f"""#!/bin/sh
if [ -f {limit} ]; then trap '' XFSZ; ulimit -f "$(cat {limit})"; fi
exec {valkey_binary()} "$@"
"""
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("OPENTINKER_VALKEY_SERVER", str(wrapper))
    async with (
        supervised(tmp_path, nats=False, backoff_s=(0.05, 0.2)) as (servers, keeper),
        Store.connect(servers.operator_url("valkey"), "test") as store,
    ):
        job = await new_job(store, "j-full")

        async def write() -> None:
            for number in range(300):
                await store.update(job, event="said", detail={"number": number, "text": 500 * "x"})

        writing = asyncio.create_task(write())
        await until(lambda: keeper.restarts >= 2)
        assert not writing.done()
        limit.unlink()
        await soon(writing)
        said = [event["number"] for event in await store.events(job) if event["event"] == "said"]
        assert said == list(range(300))
