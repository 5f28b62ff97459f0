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
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
import structlog

from opentinker.local.discovery import is_running
from opentinker.local.embedded import EmbeddedServers, nats_binary
from opentinker.local.processes import (
    ChildSpec,
    Guard,
    ServiceProcess,
    StartError,
    free_port,
    http_ok,
    port_free,
    rotate,
)
from opentinker.local.supervisor import Supervisor
from opentinker.local.up import AlreadyRunning, Plan, api_port, api_url, locked, service_specs
from opentinker.shared.security.egress import VARIABLE
from opentinker.shared.types.errors import OpenTinkerError
from tests.conftest import WAIT_S, soon, until
from tests.support.cluster import PYTHONPATH, ROOT
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


# --- up -----------------------------------------------------------------------------------------------------------


def test_a_data_directory_runs_once(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    with locked(tmp_path):
        (tmp_path / "run" / "state.json").write_bytes(orjson.dumps({"url": "http://127.0.0.1:8080", "pid": 7}))
        assert is_running(tmp_path)
        with pytest.raises(AlreadyRunning, match=r"http://127.0.0.1:8080 \(pid 7\)"), locked(tmp_path):
            pass
    assert not is_running(tmp_path)


def test_every_service_gets_a_name_and_a_health_port_of_its_own(tmp_path: Path) -> None:
    plan = Plan(data_dir=tmp_path, rollout_workers=2, env_workers=3)
    specs = service_specs(plan, 8080, "nats://n", "redis://r")
    assert [spec.name for spec in specs] == [
        *("scheduler", "rollout-0", "rollout-1", "trainer-0", "env-0", "env-1", "env-2", "reference-0")
    ]
    assert len({spec.env["OPENTINKER_HEALTH_PORT"] for spec in specs}) == len(specs)
    assert specs[0].env["OPENTINKER_HTTP_PORT"] == "8080"
    assert all(spec.env["OPENTINKER_NATS_URL"] == "nats://n" for spec in specs)


@pytest.mark.parametrize(
    ("host", "given", "allowed"),
    [("127.0.0.1", None, "127.0.0.0/8,::1/128"), ("127.0.0.1", "10.0.0.0/8", "10.0.0.0/8"), ("0.0.0.0", None, None)],
)
def test_urls_of_jobs_reach_loopback_where_only_this_machine_reaches_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, given: str | None, allowed: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    specs = service_specs(Plan(data_dir=tmp_path, host=host), 8080, "nats://n", "redis://r")
    assert {spec.name: spec.env.get(VARIABLE) for spec in specs} == {
        **{"trainer-0": None, "reference-0": None},
        **{"scheduler": allowed, "rollout-0": allowed, "env-0": allowed},
    }


def test_logs_rotate_by_size(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for text in ("first", "second", "third"):
        log.write_text(text)
        rotate(log, max_bytes=4)
    assert not log.exists()
    assert [(tmp_path / f"x.log.{n}").read_text() for n in (1, 2)] == ["third", "second"]


def test_free_ports_lie_below_those_of_outgoing_connections_and_differ() -> None:
    ports = [free_port() for _ in range(100)]
    assert all(20000 <= port < 32000 for port in ports) and len(set(ports)) == len(ports)


@contextmanager
def another(code: str) -> Iterator[int]:
    """Give the number that this code prints in another process, which lives as long."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate("\n")


def test_two_processes_are_never_told_the_same_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has bound it yet: both would find it free."""
    with another("from opentinker.local.processes import free_port; print(free_port()); input()") as taken:
        ours = free_port()
        monkeypatch.setattr("random.sample", lambda *_: [taken, ours, ours + 1, ours + 2])
        assert port_free(taken) and free_port() in (ours + 1, ours + 2)


def test_the_second_of_two_starts_with_the_same_port_is_refused(tmp_path: Path) -> None:
    """Neither has bound it yet. That the port is reserved, here by this test, refuses nobody."""
    port = free_port()
    code = f"from opentinker.local.up import *; print(api_port(Plan(data_dir=Path(), port={port}))); input()"
    with another(code) as taken:
        assert taken == port and port_free(port)
        with pytest.raises(OpenTinkerError, match=f"--port {port} is taken"):
            api_port(Plan(data_dir=tmp_path, port=port))
    assert api_port(Plan(data_dir=tmp_path, port=port)) == port


@pytest.mark.parametrize(
    ("host", "url"), [("::", "http://[::1]:"), ("::1", "http://[::1]:"), ("0.0.0.0", "http://127")]
)
def test_the_api_may_listen_on_any_address_of_the_machine(tmp_path: Path, host: str, url: str) -> None:
    plan = Plan(data_dir=tmp_path, host=host, port=0)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        try:
            taken.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        taken.listen()
        assert not port_free(taken.getsockname()[1], host)
    assert port_free(api_port(plan), host)
    assert api_url(host, 1).startswith(url)


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1"):
        api_port(Plan(data_dir=tmp_path, host="192.0.2.1", port=0))
