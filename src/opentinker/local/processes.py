"""One child process: started on a leash, with its log file and its health probe; ended with everything it started.

Embedded servers and services are both a `ServiceProcess`; `supervisor.py` keeps them alive. They are started from the
main thread only: the kernel's death signal follows the thread that forked.
"""

from __future__ import annotations

import errno
import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.shared.runtime.parent_death import guard_command, hold_command
from opentinker.shared.security.secrets import CLIENT_SECRET
from opentinker.shared.types.errors import OpenTinkerError

LOG_FILES = 3
PROBE_S = 3.0
"""Longest time a health probe may take."""


class StartError(OpenTinkerError):
    """A child did not come up; the text holds the last lines of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    name: str
    argv: tuple[str, ...]
    log: Path
    healthy: Callable[[], bool]
    """Blocking, answers within PROBE_S."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""
    grace_s: float = 120.0
    """A fresh process may take this long before it answers its first probe."""
    stop_s: float = 20.0
    """From SIGTERM to SIGKILL."""
    url: str = ""
    """Where it answers, for people."""


class Guard:
    """The process that kills what is left of our children's process groups when we are gone."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(guard_command(), stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._send(f"-{group}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # someone killed the guard: the kernel's death signal still holds the children
            self._process.stdin.write(line)
            self._process.stdin.flush()


SCHEDULER = "opentinker.services.scheduler"


def _handed_on(argv: Sequence[str]) -> dict[str, str]:
    """Return our environment variables without the user's API key, which services do not need, and but for the
    scheduler without the client secret at the identity provider."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_API_KEY")}
    if argv[-1] != SCHEDULER:
        kept.pop(CLIENT_SECRET, None)
    return kept


class ServiceProcess:
    """A restartable process. `pid` is None while it does not run."""

    def __init__(self, spec: ChildSpec, guard: Guard) -> None:
        self.spec = spec
        self.starts = 0
        self.started_at = 0.0
        """Monotonic seconds."""
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        assert self._process is None, f"{self.spec.name} runs already"
        rotate(self.spec.log)
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        command = hold_command(self.spec.argv)
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_handed_on(self.spec.argv), **self.spec.env},
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)
        self.starts += 1
        self.started_at = time.monotonic()

    def ended(self) -> int | None:
        """The exit status once the process is dead (negative: signal number), its whole group swept; else None."""
        if self._process is None:
            return 0
        # Looked at without reaping, so that the group number cannot be reused before the group is swept.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._signal_group(signal.SIGKILL)
        status = self._process.wait()
        self._guard.forget(self._process.pid)
        self._process = None
        return status

    def terminate(self) -> None:
        """Ask the process to end in good order."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)  # Popen.send_signal would reap it, see `ended`

    def kill(self) -> None:
        """SIGKILL the process and what it started."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)

    def stop(self, timeout_s: float | None = None) -> None:
        """Blocking: SIGTERM, then SIGKILL after the time-out."""
        self.terminate()
        deadline = time.monotonic() + (self.spec.stop_s if timeout_s is None else timeout_s)
        while self.ended() is None:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)

    def wait_ready(self, timeout_s: float) -> None:
        """Blocking: until the probe answers. Raises StartError when the process ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.ended()
            if status is not None:
                raise StartError(f"{self.spec.name} ended with status {status}:\n{self.tail()}")
            if self.spec.healthy():
                return
            if time.monotonic() > deadline:
                raise StartError(f"{self.spec.name} did not answer within {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self, lines: int = 12) -> str:
        return tail(self.spec.log, lines)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def tail(log: Path, lines: int) -> str:
    """Return the last lines of a log file; empty if it is absent."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def rotate(log: Path, max_bytes: int = 20 * 1024 * 1024) -> None:
    """NAME.log -> NAME.log.1 -> NAME.log.2, once it has grown beyond `max_bytes`."""
    if not log.exists() or log.stat().st_size < max_bytes:
        return
    for number in range(LOG_FILES - 1, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        newer = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        if newer.exists():
            newer.replace(older)


def port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Raises StartError if no port of this address can be listened on."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # as the services do
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise StartError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return True


_claimed: set[str] = set()
"""Names that this process claimed, of ports that are free until those bind them who were told to."""


def free_port(host: str = "127.0.0.1") -> int:
    """Reserve a port below those of outgoing connections, so that it stays free until it is bound. No other process of
    this machine gets the same port while this one lives."""
    for port in random.sample(range(20000, 32000), 2000):
        if _reservation(port) not in _claimed and port_free(port, host) and _claim(_reservation(port)):
            return port
    raise StartError(f"no free port between 20000 and 32000 on {host}")


def choose_port(port: int, host: str = "127.0.0.1") -> bool:
    """Choose a port. Return whether it is free and no other process has chosen it. Unlike for `reserve_port`, it may be
    reserved: a program that reserves a port may pass it to its child. Raises StartError as `port_free` does."""
    return port_free(port, host) and _claim(f"opentinker-chosen-{host:.64}-{port}")


def reserve_port(port: int, host: str = "127.0.0.1") -> bool:
    """Reserve a port until this process ends, so that no other process reserves it before the bind. Return whether it
    is free and reserved; repeated calls return the same. Raises StartError as `port_free` does."""
    return port_free(port, host) and _claim(_reservation(port))


def _reservation(port: int) -> str:
    return f"opentinker-port-{port}"


def _claim(name: str) -> bool:
    """Claim a name in the kernel, which releases it when this process ends in any way. Return whether no other process
    has it."""
    if name in _claimed:
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{name}")
    except OSError:
        claim.close()
        return False
    claim.detach()
    _claimed.add(name)
    return True


def http_ok(port: int, path: str, host: str = "127.0.0.1") -> bool:
    """Return whether GET answers 200 in time."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def banner(port: int, send: bytes, expect: bytes, host: str = "127.0.0.1") -> bool:
    """Return whether the server's first bytes, after `send`, are `expect`."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as connection:
            if send:
                connection.sendall(send)
            return connection.recv(len(expect)) == expect
    except OSError:
        return False
