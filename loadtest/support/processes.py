"""Servers and services that a load test starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.support.target import ROOT
from opentinker.local.embedded import EmbeddedServers
from opentinker.local.processes import free_port
from opentinker.shared.security.key_text import new_key, read_key, write_key


@contextmanager
def own_servers() -> Iterator[tuple[EmbeddedServers, Path]]:
    """NATS and Valkey on free ports, and the directory of their files."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServers(Path(directory), default_ports={}) as servers:
        yield servers, Path(directory)


@contextmanager
def started(servers: EmbeddedServers, service: str, *command: str, **settings: object) -> Iterator[int]:
    """Run the service, or the command of `opentinker`, with the service's access to the servers; gives its pid."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **servers.environment(service),
        "OPENTINKER_LOG_LEVEL": "warning",
        **{f"OPENTINKER_{name.upper()}": str(value) for name, value in settings.items()},
    }
    module = "opentinker.cli" if command else f"opentinker.services.{service.replace('-', '_')}"
    process = subprocess.Popen([sys.executable, "-m", module, *command], env=environ)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def own_scheduler(servers: EmbeddedServers, directory: Path) -> Iterator[tuple[int, str, int]]:
    """Run a scheduler; gives its pid, an operator's key and its port."""
    port, file = free_port(), directory / "operator-key"
    write_key(file, new_key("local"))
    with started(servers, "scheduler", data_dir=directory, http_port=port, admin_key_file=file) as pid:
        yield pid, read_key(file), port


def nats_pid(servers: EmbeddedServers) -> int:
    pid = servers.children["nats"].pid
    assert pid is not None
    return pid
