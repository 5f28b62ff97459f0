"""What `opentinker up` prints on a terminal, and what where there is none."""

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


@pytest.mark.nightly
def test_two_starts_at_the_same_moment_take_different_ports(tmp_path: Path) -> None:
    api, *servers = unclaimed_ports(1 + len(DEFAULT_PORTS))
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        (place / "run").mkdir(parents=True)
        (place / "run" / "api-port").write_text(str(api))
        (place / "run" / "servers.json").write_bytes(orjson.dumps(dict(zip(DEFAULT_PORTS, servers, strict=True))))
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
    assert len({each["url"] for each in facts}) == 2 and f"http://127.0.0.1:{api}" in {each["url"] for each in facts}
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
