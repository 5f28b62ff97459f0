"""What `opentinker up` holds to: one run per data directory, names and ports, addresses, logs of bounded size."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from opentinker.local.discovery import is_running
from opentinker.local.processes import StartError, free_port, port_free, rotate
from opentinker.local.up import AlreadyRunning, Plan, api_port, api_url, locked, service_specs
from opentinker.shared.security.egress import VARIABLE
from opentinker.shared.types.errors import OpenTinkerError
from tests.support.cluster import PYTHONPATH


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


def test_shared_jobs_have_one_more_trainer(tmp_path: Path) -> None:
    specs = service_specs(Plan(data_dir=tmp_path, shared_jobs=3), 8080, "nats://n", "redis://r")
    rooms = {spec.name: spec.env.get("OPENTINKER_BANK_JOBS") for spec in specs}
    assert rooms.pop("shared-0") == "3" and set(rooms.values()) == {None}
    assert specs[-1].argv[-1] == "opentinker.services.trainer"
    assert "shared-0" not in [spec.name for spec in service_specs(Plan(data_dir=tmp_path), 8080, "n", "r")]


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
