"""How many trivial environment steps per second go through the scheduler to a process that serves its environment.

    python -m loadtest.served_plane [--sessions 64] [--seconds 5] [--turns 200] [--warm-up 1]

Starts nats-server and a Redis-compatible server on free ports, one scheduler, one `opentinker env serve` connected to
it by a WebSocket on loopback, and plays `sessions` episodes at once from this process as `loadtest.env_plane` does.
Prints steps/s, latency of a step, and CPU time per step of each process; exit status 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from loadtest.env_plane import ENVIRONMENT, Client, measure, options
from opentinker.local.embedded import EmbeddedServers
from opentinker.local.processes import free_port
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.security.key_text import new_key, read_key, write_key
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1_000
JOB = "j-loadtest00"
SPEC = {
    "name": "load",
    "model": {"base": "no/model"},
    "environment": {"name": "served:load"},
    "train": {"steps": 1},
}


async def run(arguments: argparse.Namespace, servers: EmbeddedServers, pids: dict[str, int]) -> bool:
    async with Store.connect(servers.operator_url("valkey"), "load") as store:
        await store.create_job(id=JOB, spec=parse_spec(SPEC).model_dump(mode="json"), tenant="default")
    async with Bus.connect(servers.operator_url("nats"), "load", "rollout-worker") as bus:
        return await measure(Client(bus, arguments.turns, "served:load", JOB), arguments, pids, TARGET)


def main() -> None:
    arguments = options(__doc__)
    with tempfile.TemporaryDirectory() as directory, EmbeddedServers(Path(directory), default_ports=False) as servers:
        port, key = free_port(), Path(directory) / "operator-key"
        write_key(key, new_key("local"))
        url = f"http://127.0.0.1:{port}"
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **servers.environment("scheduler"),
            "OPENTINKER_DATA_DIR": directory,
            "OPENTINKER_HTTP_PORT": str(port),
            "OPENTINKER_ADMIN_KEY_FILE": str(key),
            "OPENTINKER_API_KEY": read_key(key),
            "OPENTINKER_LOG_LEVEL": "warning",
        }
        serve = ["env", "serve", ENVIRONMENT, "--name", "load", "--concurrency", str(arguments.sessions), "--url", url]
        started = {
            "scheduler": subprocess.Popen([sys.executable, "-m", "opentinker.services.scheduler"], env=environ),
            "served": subprocess.Popen([sys.executable, "-m", "opentinker.cli", *serve], env=environ),
        }
        try:
            nats = servers.children["nats"].pid
            assert nats is not None
            pids = {name: process.pid for name, process in started.items()} | {"client": os.getpid(), "nats": nats}
            good = uvloop.run(run(arguments, servers, pids))
        finally:
            for process in reversed(started.values()):
                process.terminate()
                process.wait()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
