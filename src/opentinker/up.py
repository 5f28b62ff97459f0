"""Everything on this machine: the processes `opentinker up` starts, their environment, the lock of the data directory.

DATA_DIR/run/lock         held by the running `up`
DATA_DIR/run/state.json   its pid, URLs, and every child's pid, state and log
DATA_DIR/run/api-token    where other machines may ask: what they must bear
DATA_DIR/logs/NAME.log
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog

from opentinker.embedded import EmbeddedServers
from opentinker.processes import Child, ChildSpec, Guard, free_port, http_ok, port_free
from opentinker.shared import egress
from opentinker.shared.config import LOOPBACK_HOSTS, PREFIX
from opentinker.shared.errors import OpenTinkerError
from opentinker.supervisor import Supervisor

log = structlog.get_logger()

DEFAULT_PORT = 8080
TOKEN_FILE = "api_token_file"
"""The setting, and its name in state.json."""
DRAIN_S = 25.0
"""A little more than the services give themselves (`drain_s`)."""
SMALL_MACHINE_CORES = 4
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. `port` None: 8080, or a free one if that is taken."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int | None = None
    rollout_workers: int = 1
    trainers: int = 1
    references: int = 1
    env_workers: int = 1
    nats_url: str | None = None
    """An external server; None starts the embedded one."""
    redis_url: str | None = None

    def services(self) -> list[tuple[str, str]]:
        """(worker id, module name), in the order in which they start."""
        counts = {
            "rollout_worker": ("rollout", self.rollout_workers),
            "trainer": ("trainer", self.trainers),
            "env_worker": ("env", self.env_workers),
            "reference_forward": ("reference", self.references),
        }
        workers = [(f"{short}-{n}", module) for module, (short, count) in counts.items() for n in range(count)]
        return [("scheduler", "scheduler"), *workers]


class AlreadyRunning(OpenTinkerError):
    pass


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. Raises AlreadyRunning, saying who holds it."""
    path = data_dir / "run" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read_state(data_dir)
            raise AlreadyRunning(
                f"opentinker is running on {data_dir} already: {state.get('url', 'still starting')} "
                f"(pid {state.get('pid', '?')}). Stop it with: opentinker down --data-dir {data_dir}"
            ) from None
        yield


def is_running(data_dir: Path) -> bool:
    try:
        with (data_dir / "run" / "lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_state(data_dir: Path) -> dict[str, Any]:
    """state.json, {} if there is none."""
    try:
        state: dict[str, Any] = orjson.loads((data_dir / "run" / "state.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return state


async def serve(plan: Plan) -> None:
    """Start everything, keep it alive until SIGINT or SIGTERM, stop everything."""
    with locked(plan.data_dir):
        (plan.data_dir / "run" / "state.json").unlink(missing_ok=True)
        guard = Guard()
        servers = EmbeddedServers(plan.data_dir, nats=plan.nats_url is None, redis=plan.redis_url is None, guard=guard)
        try:
            port = api_port(plan)
            servers.start()
            nats_url, redis_url = plan.nats_url or servers.nats_url, plan.redis_url or servers.redis_url
            url = api_url(plan.host, port)
            facts = {"url": url, "nats_url": nats_url, "redis_url": redis_url, "data_dir": str(plan.data_dir)}
            token = token_file(plan)
            if token is not None:
                facts[TOKEN_FILE] = str(token)
            specs = service_specs(plan, port, nats_url, redis_url, token)
            stages = [list(servers.children.values()), [Child(spec, guard) for spec in specs]]
            supervisor = Supervisor(stages, plan.data_dir / "run" / "state.json", {**facts, "started": time.time()})
            log.info("starting", **facts, logs=str(plan.data_dir / "logs"))
            await _until_told(supervisor)
            log.info("stopped", data_dir=str(plan.data_dir))
        finally:
            servers.stop()
            guard.close()


def api_port(plan: Plan) -> int:
    """The port asked for, else the one of this data directory's last life, else 8080, else a free one."""
    if plan.port is not None:
        if plan.port and not port_free(plan.port, plan.host):
            raise OpenTinkerError(f"--port {plan.port} is taken on {plan.host}; leave it out to get a free one")
        return plan.port or free_port(plan.host)
    remembered = plan.data_dir / "run" / "api-port"
    last = remembered.read_text() if remembered.exists() else ""
    candidates = [int(last)] if last.isdigit() else []
    port = next((p for p in [*candidates, DEFAULT_PORT] if port_free(p, plan.host)), None) or free_port(plan.host)
    if port != DEFAULT_PORT:
        log.warning("api_port", port=port, reason=f"{DEFAULT_PORT} is taken, or this data directory used {port} before")
    remembered.write_text(str(port))
    return port


def token_file(plan: Plan) -> Path | None:
    """The file that the settings name, else one of ours where other machines may ask, made at the first time."""
    if given := os.environ.get(PREFIX + TOKEN_FILE.upper()):
        return Path(given).absolute()
    if plan.host in LOOPBACK_HOSTS:
        log.warning("no_api_token", reason=f"whoever is on this machine may use {plan.host}")
        return None
    path = plan.data_dir / "run" / "api-token"
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path


def service_specs(plan: Plan, port: int, nats_url: str, redis_url: str, token: Path | None = None) -> list[ChildSpec]:
    common = {
        "OPENTINKER_NATS_URL": nats_url,
        "OPENTINKER_REDIS_URL": redis_url,
        "OPENTINKER_DATA_DIR": str(plan.data_dir),
        "OPENTINKER_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
    }
    if (os.cpu_count() or 1) <= SMALL_MACHINE_CORES and "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = "1"  # two spinning pools on few cores are several times slower than one thread
    specs = []
    for worker, module in plan.services():
        health_port = free_port()
        env = {**common, "OPENTINKER_WORKER_ID": worker, "OPENTINKER_HEALTH_PORT": str(health_port)}
        if module == "scheduler":
            env |= {"OPENTINKER_HTTP_HOST": plan.host, "OPENTINKER_HTTP_PORT": str(port)}
            env |= {} if token is None else {PREFIX + TOKEN_FILE.upper(): str(token)}
        if module == "env_worker" and plan.host in LOOPBACK_HOSTS:  # who submits jobs is on this machine already
            env[egress.VARIABLE] = os.environ.get(egress.VARIABLE, ",".join(egress.LOOPBACK))
        specs.append(
            ChildSpec(
                name=worker,
                argv=(sys.executable, "-m", f"opentinker.services.{module}"),
                env=env,
                log=plan.data_dir / "logs" / f"{worker}.log",
                healthy=partial(http_ok, health_port, "/healthz"),
                stop_s=DRAIN_S,
                url=f"http://127.0.0.1:{health_port}",
            )
        )
    return specs


async def _until_told(supervisor: Supervisor) -> None:
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) stops in good order, the second at once."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        if supervisor.stopping.is_set():
            supervisor.hurry.set()
        else:
            log.info("stopping", hint="again to kill what is still running")
            supervisor.stopping.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, told)
    announce = asyncio.create_task(_announce(supervisor))
    try:
        await supervisor.run()
    finally:
        announce.cancel()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _announce(supervisor: Supervisor) -> None:
    started = time.monotonic()
    await supervisor.ready.wait()
    log.info("ready", seconds=round(time.monotonic() - started, 1), children=len(supervisor.keepers))


def api_url(host: str, port: int) -> str:
    """Under which the API is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
