"""A service process from the outside: health, drain, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from opentinker.shared.runtime.liveness import HeartbeatWatch
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.state.store import Store
from tests.conftest import Server, until
from tests.support.cluster import ROOT

MINIMAL = str(ROOT / "tests" / "samples" / "minimal_service.py")


class Process:
    """A minimal service whose log goes to a file."""

    def __init__(self, mode: str, log: Path, **settings: str) -> None:
        self.path = log
        environ = os.environ | {f"OPENTINKER_{name.upper()}": value for name, value in settings.items()}
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, MINIMAL, mode],
                stdout=out, stderr=subprocess.STDOUT, env=environ,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.path.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    async def logged(self, name: str) -> dict[str, Any]:
        await until(lambda: self.events(name) or self.popen.poll() is not None)
        assert self.events(name), f"no {name!r} in:\n{self.text}"
        return self.events(name)[0]

    async def ended(self) -> int:
        await until(lambda: self.popen.poll() is not None)
        return int(self.popen.returncode)

    def stop(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    async def get(self, path: str) -> tuple[int, str]:
        at = await self.logged("health")
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{at['port']}{path}") as response:
            return response.status, await response.text()


Start = Callable[..., Process]


@pytest.fixture
def start(nats_server: Server, valkey_server: Server, tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start(mode: str, **settings: str) -> Process:
        servers = {"nats_url": nats_server.url, "redis_url": valkey_server.url, "worker_id": "minimal-0"}
        started.append(Process(mode, tmp_path / f"{len(started)}.log", **(servers | settings)))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait()


async def test_service_answers_and_drains(start: Start) -> None:
    process = start("drains")
    await process.logged("ready")
    status, body = await process.get("/healthz")
    assert (status, json.loads(body)) == (200, {"status": "ok", "service": "minimal", "worker": "minimal-0"})
    status, body = await process.get("/readyz")
    assert status == 200 and json.loads(body)["ready"] is True
    status, body = await process.get("/metrics")
    assert status == 200 and "opentinker_metric" in body
    process.stop()
    await until(lambda: process.events("drained") or process.popen.poll() is not None)
    assert await process.ended() == 0
    assert [line["event"] for line in process.events("drained") + process.events("stopped")] == ["drained", "stopped"]
    assert process.events("ready")[0]["worker"] == "minimal-0"


async def test_service_that_never_lets_go_is_cut_short(start: Start) -> None:
    process = start("hangs", drain_s="0.1")
    await process.logged("ready")
    process.stop()
    assert await process.ended() == 0
    assert process.events("drain_cut_short")


@pytest.mark.parametrize(("mode", "why"), [("raises", "planted failure"), ("returns", "without being told to")])
async def test_failure_ends_the_process_with_its_traceback(start: Start, mode: str, why: str) -> None:
    process = start(mode)
    assert await process.ended() == 1
    (line,) = process.events("crashed")
    assert why in line["exception"] and "Traceback" in line["exception"]


async def test_service_waits_for_servers_that_come_later(start: Start, own_server: Server) -> None:
    own_server.kill()
    process = start("drains", nats_url=own_server.url)
    await process.logged("nats_error")
    assert not process.events("ready")
    own_server.start()
    await process.logged("ready")
    process.stop()
    assert await process.ended() == 0


async def test_service_that_waits_for_servers_stops_at_once(start: Start) -> None:
    process = start("drains", nats_url="nats://127.0.0.1:1")
    await process.logged("nats_error")
    process.stop()
    assert await process.ended() == 0


async def test_service_is_not_ready_while_nats_is_away(start: Start, own_server: Server) -> None:
    process = start("drains", nats_url=own_server.url)
    await process.logged("ready")
    own_server.kill()

    async def ready() -> bool:
        return (await process.get("/readyz"))[0] == 200

    await until(ready, lambda found: not found)
    own_server.start()
    await until(ready)
    assert process.popen.poll() is None
    await process.logged("nats_reconnected")
    said = [line["event"] for name in ("nats_error", "nats_reconnected") for line in process.events(name)]
    assert said == ["nats_error", "nats_reconnected"], "a line for the outage and one for its end"


async def test_what_the_event_loop_has_to_say_is_in_the_log(start: Start) -> None:
    process = start("forgets")
    line = await process.logged("unhandled")
    assert "planted" in line["exception"] and "never retrieved" in line["error"]
    await process.logged("forgotten")
    assert len(process.events("unhandled")) == 1, "a lookup that nobody waits for any more is nobody's mistake"
    assert all(line.startswith("{") for line in process.text.splitlines()), process.text


async def test_wrong_settings_end_with_code_2_and_every_name(start: Start) -> None:
    process = start("drains", health_port="99999", log_level="loud", heartbeat_s="-1")
    assert await process.ended() == 2
    for name in ("health_port", "log_level", "heartbeat_s"):
        assert name in process.text
    assert "Traceback" not in process.text


async def test_heartbeat_of_a_killed_worker_stands_still(start: Start, store: Store) -> None:
    watch = HeartbeatWatch()
    process = start("leased", worker_ttl_s="0.5", heartbeat_s="0.1")
    await until(store.workers)
    process.popen.kill()
    process.popen.wait()
    (before,) = await store.beats()
    await until(store.beats, lambda found: watch.silent(found))
    assert await store.beats() == [before]
    process = start("leased", worker_ttl_s="30", heartbeat_s="0.1")
    await until(store.beats, lambda found: found[0].incarnation != before.incarnation)
    process.stop()
    assert await process.ended() == 0
    assert await store.workers() == [], "a worker that stops says so"


async def test_first_failure_wins_and_the_rest_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def sleeps() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await first_failure({"sleeps": sleeps(), "fails": fails()})
    assert cancelled.is_set()
