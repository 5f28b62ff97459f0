"""What `opentinker up` prints on a terminal, and what where there is none."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import orjson

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
