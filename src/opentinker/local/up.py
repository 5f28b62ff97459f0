"""Everything on this machine: the processes `opentinker up` starts, their environment, the lock of the data directory.

DATA_DIR/run/lock         held by the running `up`
DATA_DIR/run/state.json   its pid, URLs, and every child's pid, state and log
DATA_DIR/run/operator-key the key of the first operator, made at the first start
DATA_DIR/run/access/      users of NATS and Valkey, one per service
DATA_DIR/logs/NAME.log
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from opentinker.local.discovery import KEY_FILE, read_state
from opentinker.local.embedded import EmbeddedServers
from opentinker.local.processes import (
    ChildSpec,
    Guard,
    ServiceProcess,
    choose_port,
    free_port,
    http_ok,
    reserve_port,
)
from opentinker.local.supervisor import Supervisor
from opentinker.shared.durable_files import is_blank, make_directories, replace_durably
from opentinker.shared.login_settings import LOOPBACK_HOSTS
from opentinker.shared.messaging.subjects import ENV, REFERENCE, ROLLOUT
from opentinker.shared.runtime import gpus, launched_processes
from opentinker.shared.security import egress
from opentinker.shared.security.key_text import new_key, parse, read_key, write_key
from opentinker.shared.security.redact import redacted
from opentinker.shared.settings_sources import PREFIX, load_settings
from opentinker.shared.types.errors import OpenTinkerError

log = structlog.get_logger()

DEFAULT_PORT = 8080
DRAIN_S = 25.0
"""A little more than the services give themselves (`drain_s`)."""
SMALL_MACHINE_CORES = 4
SERVICE_OF = {"rollout_worker": ROLLOUT, "env_worker": ENV, "reference_forward": REFERENCE}
"""Module -> what its service is called, where that differs."""
CONNECTING = ("env_worker", "rollout_worker", "scheduler")
"""Modules that connect to URLs of jobs, or check them."""
SHARED_TRAINER = "shared-0"
"""Worker id of the trainer whose jobs share a base model; it has no GPU."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Processes to run. `port` None: 8080, or a free one if that is taken."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int | None = None
    rollout_workers: int = 1
    trainers: int = 1
    shared_jobs: int = 0
    """Jobs that one more trainer trains at a time on one base; 0: there is no such trainer."""
    references: int = 1
    env_workers: int = 1
    nats_url: str | None = None
    """An external server; None starts the embedded one."""
    redis_url: str | None = None
    auth: bool = True
    """Whether the API asks for keys."""

    def services(self) -> list[tuple[str, str]]:
        """(worker id, module name), in the order in which they start."""
        counts = {
            "rollout_worker": ("rollout", self.rollout_workers),
            "trainer": ("trainer", self.trainers),
            "env_worker": ("env", self.env_workers),
            "reference_forward": ("reference", self.references),
        }
        workers = [(f"{short}-{n}", module) for module, (short, count) in counts.items() for n in range(count)]
        shared = [(SHARED_TRAINER, "trainer")] if self.shared_jobs else []
        return [("scheduler", "scheduler"), *workers, *shared]


class AlreadyRunning(OpenTinkerError):
    pass


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. Raises AlreadyRunning, saying who holds it."""
    path = data_dir / "run" / "lock"
    try:
        make_directories(path.parent)
        lock = path.open("w")
    except OSError as error:
        raise OpenTinkerError(
            f"{data_dir} cannot be written ({error.strerror}): choose another directory with --data-dir"
        ) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read_state(data_dir)
            raise AlreadyRunning(
                f"opentinker is running on {data_dir} already: {state.get('url', 'still starting')} "
                f"(pid {state.get('pid', '?')}). Stop it with: opentinker down --data-dir {data_dir}"
            ) from None
        yield


Tell = Callable[[str, Mapping[str, str]], None]
"""Called with a phase (starting, ready, stopping, stopped) and the facts of state.json."""


async def serve(plan: Plan, tell: Tell = lambda *_: None) -> None:
    """Start everything, keep it alive until SIGINT or SIGTERM, stop everything."""
    with locked(plan.data_dir):
        (plan.data_dir / "run" / "state.json").unlink(missing_ok=True)
        guard = Guard()
        servers: EmbeddedServers | None = None
        try:
            port = api_port(plan)
            servers = EmbeddedServers(
                plan.data_dir,
                nats=plan.nats_url is None,
                redis=plan.redis_url is None,
                guard=guard,
                websocket_host=plan.host,
                origins=page_origins(plan.host, port),
            )
            servers.start()
            nats_url, redis_url = plan.nats_url or servers.nats_url, plan.redis_url or servers.redis_url
            url = api_url(plan.host, port)
            shown = {"nats_url": redacted(nats_url), "redis_url": redacted(redis_url)}
            facts = {"url": url, **shown, "data_dir": str(plan.data_dir)}
            key = operator_key(plan)
            if key is not None:
                facts[KEY_FILE] = str(key)
            specs = service_specs(plan, port, nats_url, redis_url, key, servers.environment)
            stages = [list(servers.children.values()), [ServiceProcess(spec, guard) for spec in specs]]
            supervisor = Supervisor(
                stages,
                plan.data_dir / "run" / "state.json",
                {**facts, "started": time.time()},
                afterwards=partial(end_launched, plan.data_dir),
            )
            log.info("starting", **facts, logs=str(plan.data_dir / "logs"))
            tell("starting", facts)
            await _until_told(supervisor, servers, lambda phase: tell(phase, facts))
            log.info("stopped", data_dir=str(plan.data_dir))
            tell("stopped", facts)
        finally:
            if servers is not None:
                servers.stop()
            guard.close()


def end_launched(data_dir: Path) -> None:
    """End workers started by the scheduler's launcher, which outlive it, while the servers still accept what they
    save."""
    if ended := launched_processes.end_all(data_dir, DRAIN_S):
        log.info("launched_workers_ended", names=ended)


def api_port(plan: Plan) -> int:
    """The port asked for, else the one of this data directory's last life, else 8080, else a free one. Another `up`
    that starts at the same moment chooses another one."""
    if plan.port:
        if not choose_port(plan.port, plan.host):
            raise OpenTinkerError(f"--port {plan.port} is taken on {plan.host}; leave it out to get a free one")
        reserve_port(plan.port, plan.host)  # unless it is reserved: no other `up` may choose it
        return plan.port
    if plan.port is not None:
        return free_port(plan.host)
    remembered = plan.data_dir / "run" / "api-port"
    last = remembered.read_text() if remembered.exists() else ""
    candidates = [int(last)] if last.isdigit() else []
    port = next((p for p in [*candidates, DEFAULT_PORT] if reserve_port(p, plan.host)), None) or free_port(plan.host)
    if port != DEFAULT_PORT:
        log.info("api_port", port=port, reason=f"{DEFAULT_PORT} is taken, or this data directory used {port} before")
    replace_durably(remembered, str(port).encode())
    return port


def operator_key(plan: Plan) -> Path | None:
    """The file with the operator's key: the one that the settings name, else ours, made at the first start.
    None: no key is asked for. Raises OpenTinkerError."""
    settings = load_settings()
    if not (plan.auth and settings.auth):
        if plan.host not in LOOPBACK_HOSTS:
            raise OpenTinkerError(f"--host {plan.host} is for other machines too: there --no-auth is refused")
        log.warning("AUTH IS OFF", reason=f"everyone on this machine is an operator of {plan.host}")
        return None
    if settings.admin_key_file is not None:
        return settings.admin_key_file.absolute()
    path = plan.data_dir / "run" / "operator-key"
    if is_blank(path):
        write_key(path, new_key(settings.key_env))
        log.info("operator_key_created", file=str(path))
    env, _ = parse(read_key(path)) or ("", "")
    if env != settings.key_env:
        raise OpenTinkerError(
            f"{path} is a key of {env!r}, and key_env is {settings.key_env!r}: remove it to get a new one"
        )
    return path


def service_specs(
    plan: Plan,
    port: int,
    nats_url: str,
    redis_url: str,
    key: Path | None = None,
    access: Callable[[str], dict[str, str]] = lambda _: {},
) -> list[ChildSpec]:
    """Return the services to start. `access`: additional variables with which a service connects as its user."""
    common = {
        "OPENTINKER_NATS_URL": nats_url,
        "OPENTINKER_REDIS_URL": redis_url,
        "OPENTINKER_DATA_DIR": str(plan.data_dir),
        "OPENTINKER_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
    }
    if (os.cpu_count() or 1) <= SMALL_MACHINE_CORES and "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = "1"  # two spinning pools on few cores are several times slower than one thread
    given = _gpus(plan)
    specs = []
    for worker, module in plan.services():
        health_port = free_port()
        env = {**common, "OPENTINKER_WORKER_ID": worker, "OPENTINKER_HEALTH_PORT": str(health_port)}
        env |= given.get(worker, {})
        if worker == SHARED_TRAINER:
            env[f"{PREFIX}BANK_JOBS"] = str(plan.shared_jobs)
        env |= access(SERVICE_OF.get(module, module))
        if module == "scheduler":
            env |= {"OPENTINKER_HTTP_HOST": plan.host, "OPENTINKER_HTTP_PORT": str(port)}
            env |= {f"{PREFIX}AUTH": "false"} if key is None else {PREFIX + KEY_FILE.upper(): str(key)}
            env |= _launcher_access(env.get(PREFIX + "NATS_PASSWORD_FILE"))
        if module in CONNECTING and plan.host in LOOPBACK_HOSTS:  # who submits jobs is on this machine already
            env[egress.VARIABLE] = os.environ.get(egress.VARIABLE, ",".join(egress.LOOPBACK))
        specs.append(
            ChildSpec(
                name=worker,
                argv=(sys.executable, "-P", "-m", f"opentinker.services.{module}"),
                env=env,
                log=plan.data_dir / "logs" / f"{worker}.log",
                healthy=partial(http_ok, health_port, "/healthz"),
                stop_s=DRAIN_S,
                url=f"http://127.0.0.1:{health_port}",
            )
        )
    return specs


def _launcher_access(password_file: str | None) -> dict[str, str]:
    """The folder with the passwords of what the scheduler starts, where that is ours."""
    settings = load_settings()
    if settings.launcher != "process" or settings.launcher_access is not None or password_file is None:
        return {}
    return {PREFIX + "LAUNCHER_ACCESS": str(Path(password_file).parent)}


def _gpus(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the variables that limit each worker to its GPUs; empty where there are none. Reference-forward shares
    those of the first trainer; the scheduler has all where no other process does, for the workers it starts."""
    names = [worker for worker, _ in plan.services()]
    own = sorted((name for name in names if name.startswith(("trainer-", "rollout-"))), key=lambda n: n[0] == "r")
    if not (found := gpus.visible()):
        return {}
    pinned = gpus.pinned(found, own) or {"scheduler": gpus.pin_of(found)}
    shared = next(iter(pinned.values()))
    pins = {name: pinned.get(name, shared if name.startswith("reference-") else "") for name in names}
    given = {name: {gpus.VISIBLE: pin, **gpus.ORDER} for name, pin in pins.items()}
    if "reference_device" not in load_settings().model_fields_set and _torch_has_cuda():
        for name in names:
            if name.startswith("reference-"):
                given[name][f"{PREFIX}REFERENCE_DEVICE"] = "cuda"
    return given


def _torch_has_cuda() -> bool:
    """Return whether the installed torch may be a build for GPUs, without importing it."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


async def _until_told(supervisor: Supervisor, servers: EmbeddedServers, tell: Callable[[str], None]) -> None:
    """Stop in good order at the first SIGINT, SIGTERM or SIGHUP (a closed terminal), immediately at the second."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        if supervisor.stopping.is_set():
            supervisor.hurry.set()
        else:
            log.info("stopping", hint="again to kill what is still running")
            tell("stopping")
            supervisor.stopping.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, told)
    announce = asyncio.create_task(_announce(supervisor, servers, tell))
    try:
        await supervisor.run()
    finally:
        announce.cancel()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _announce(supervisor: Supervisor, servers: EmbeddedServers, tell: Callable[[str], None]) -> None:
    started = time.monotonic()
    await supervisor.ready.wait()
    await asyncio.to_thread(servers.sync_streams)
    log.info("ready", seconds=round(time.monotonic() - started, 1), children=len(supervisor.keepers))
    tell("ready")


def page_origins(host: str, port: int) -> tuple[str, ...]:
    """Pages that may connect to NATS: those of the API, and those of `nats_websocket_origins` and `http_origins`. Where
    the API is for other machines, they know this one by names that we do not: there what the first setting says, with
    the other one, is all, and nothing means every page."""
    settings = load_settings()
    if host not in LOOPBACK_HOSTS:
        return settings.stream_origins
    own = (f"http://{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))
    return (*own, *settings.nats_websocket_origins, *settings.http_origins)


def api_url(host: str, port: int) -> str:
    """Under which the API is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
