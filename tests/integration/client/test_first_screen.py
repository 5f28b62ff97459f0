"""The output of `opentinker up`, on a terminal and without one."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import urllib.request
from itertools import islice
from pathlib import Path

import orjson
import pytest

from opentinker.local.embedded import DEFAULT_PORTS
from opentinker.local.processes import port_free
from tests.integration.client.test_cli import environ

NO_WORKERS = [f"--{pool}=0" for pool in ("rollout-workers", "trainers", "env-workers", "reference")]


def up(data_dir: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "opentinker.cli", "up", "--data-dir", str(data_dir), *NO_WORKERS, *options]


def test_on_a_terminal_up_says_where_to_go_and_shows_no_key(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    said = b""
    with subprocess.Popen(up(tmp_path), stdin=theirs, stdout=theirs, stderr=theirs, env=environ()) as process:
        os.close(theirs)
        try:
            while b"Stop with Ctrl-C" not in said:
                said += os.read(ours, 4096)
            url = orjson.loads((tmp_path / "run" / "state.json").read_bytes())["url"]
        finally:
            process.send_signal(signal.SIGINT)
            while b"Stopped." not in said:
                said += os.read(ours, 4096)
    os.close(ours)
    lines = [line.strip() for line in said.decode().splitlines()]
    key = tmp_path / "run" / "operator-key"
    assert url in lines and str(key) in lines and any("submit" in line and url in line for line in lines)
    assert key.read_text().strip() not in said.decode()
    assert "Stopping; press Ctrl-C again to kill what is still running." in lines
    assert not any("=" in line and "OPENTINKER_API_KEY_FILE=" not in line for line in lines), lines


def test_in_a_pipe_up_prints_lines_of_json(tmp_path: Path) -> None:
    events = []
    with subprocess.Popen(up(tmp_path, "--json"), stdout=subprocess.PIPE, text=True, env=environ()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(orjson.loads(line))
            if events[-1]["event"] == "ready":
                process.send_signal(signal.SIGINT)
    assert {"starting", "ready", "stopping", "stopped"} <= {event["event"] for event in events}
    assert not any(event["level"] == "debug" for event in events)


def unclaimed_ports(count: int) -> list[int]:
    """Free ones that no process has reserved: not `free_port`, which would reserve them for this process."""
    return list(islice((port for port in random.sample(range(14000, 19000), 1000) if port_free(port)), count))


CHOOSE = """
import orjson, sys
from pathlib import Path
from opentinker.local.embedded import EmbeddedServers
from opentinker.local.up import Plan, api_port
place = Path(sys.argv[1])
servers = EmbeddedServers(place)
for name in ("nats", "valkey"):
    servers._choose_ports(name, servers._remembered(), fresh=False)
print(orjson.dumps({**servers.ports, "api": api_port(Plan(data_dir=place))}).decode(), flush=True)
input()
"""


def remembering(place: Path, ports: dict[str, int]) -> Path:
    """A data directory whose last life had these ports."""
    (place / "run").mkdir(parents=True)
    (place / "run" / "api-port").write_text(str(ports["api"]))
    servers = {name: ports[name] for name in DEFAULT_PORTS}
    (place / "run" / "servers.json").write_bytes(orjson.dumps(servers))
    return place


def test_of_two_that_remember_the_same_ports_the_second_takes_others(tmp_path: Path) -> None:
    """Neither has bound them yet."""
    names = [*DEFAULT_PORTS, "api"]
    remembered = dict(zip(names, unclaimed_ports(len(names)), strict=True))
    chosen: list[dict[str, int]] = []
    with contextlib.ExitStack() as stack:
        for place in ("one", "two"):
            argv = [sys.executable, "-c", CHOOSE, str(remembering(tmp_path / place, remembered))]
            child = stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ())
            )
            stack.callback(child.kill)
            assert child.stdout is not None
            chosen.append(orjson.loads(next(line for line in child.stdout if line.startswith(b"{"))))
    first, second = chosen
    assert first == remembered and not {*first.values()} & {*second.values()}


@pytest.mark.nightly
def test_two_starts_at_the_same_moment_take_different_ports(tmp_path: Path) -> None:
    names = [*DEFAULT_PORTS, "api"]
    ports = dict(zip(names, unclaimed_ports(len(names)), strict=True))
    places = [remembering(tmp_path / place, ports) for place in ("one", "two")]
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen(up(place, "--json"), stdout=subprocess.PIPE, text=True, env=environ()))
            for place in places
        ]
        for process in running:
            stack.callback(process.send_signal, signal.SIGINT)
        facts = [wait_ready(process) for process in running]
        for each in facts:
            with urllib.request.urlopen(f"{each['url']}/healthz") as answer:
                assert answer.status == 200
    assert len({each["url"] for each in facts}) == 2 and f"http://127.0.0.1:{ports['api']}" in {
        each["url"] for each in facts
    }
    for name in ("nats_url", "redis_url"):
        assert len({each[name] for each in facts}) == 2, "each has servers of its own"


def wait_ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """The facts of an `up --json` that is ready; the rest of its output is read too, until it ends."""
    assert process.stdout is not None
    facts: dict[str, str] = {}
    for line in process.stdout:
        said = orjson.loads(line)
        facts |= said if said["event"] == "starting" else {}
        if said["event"] == "ready":
            return facts
    raise AssertionError(f"it ended before it was ready: {facts}")
