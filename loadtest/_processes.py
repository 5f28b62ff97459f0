"""Servers and services that a load test starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest._target import ROOT
from opentinker.local.embedded import EmbeddedServers


@contextmanager
def own_servers() -> Iterator[tuple[EmbeddedServers, Path]]:
    """NATS and Valkey on free ports, and the directory of their files."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServers(Path(directory), default_ports=False) as servers:
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


def nats_pid(servers: EmbeddedServers) -> int:
    pid = servers.children["nats"].pid
    assert pid is not None
    return pid
