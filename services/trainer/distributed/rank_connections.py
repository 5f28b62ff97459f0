"""Rank 0's connections to the other ranks: processes that this trainer has started, or that another one runs.

The protocol is the same (`rank_protocol.py`); a local rank is reached by a socket pair, a remote one by TCP.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from opentinker.services.trainer.distributed.rank_environment import inherited
from opentinker.services.trainer.distributed.rank_protocol import HEAD, Answer, Beat, FromRank
from opentinker.shared.types import codec
from opentinker.shared.types.errors import OpenTinkerError

HUNG_S = 600.0
"""A process that works this long without a heartbeat hangs."""
REMOTE_FACTOR = 3.0
"""A remote rank may be silent for this much longer: whether it uses its processor is not seen from here."""
LINK_TIMEOUT_S = 30
"""A TCP connection ends when sent bytes were not acknowledged for this time; an idle one is probed more often."""
GRACE_S = 3.0
STAT_UTIME, STAT_STIME = 11, 12
"""Indices in /proc/PID/stat, counted after the process name: see proc(5)."""


class RankLost(OpenTinkerError):
    """A rank died, hangs or has crashed. The trainer ends; the job continues from its newest checkpoint."""

    def __init__(self, why: str, worker: str = "") -> None:
        """`worker`: the trainer that ran the rank, if it is another one."""
        super().__init__(f"{why}; the trainer starts again from the newest checkpoint")
        self.why, self.worker = why, worker


def start_rank(connection: socket.socket, rank: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which takes commands from the connection. It ends with the calling thread."""
    module = "opentinker.services.trainer.distributed.rank_main"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(connection.fileno()), str(rank)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # output of libraries goes to the trainer's log
        pass_fds=[connection.fileno()],
        env=inherited() | variables,
    )


def describe_exit(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def bound_silence(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other end does not answer any longer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", LINK_TIMEOUT_S // 3),
        ("TCP_KEEPINTVL", LINK_TIMEOUT_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", LINK_TIMEOUT_S * 1000),
    ):
        if hasattr(socket, option):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class RankConnection:
    """A rank and the socket to it."""

    worker = ""
    """The other trainer that runs it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.answer: Answer | None = None
        self.heard, self.started = time.monotonic(), False
        self._bytes = bytearray()

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def receive(self) -> str:
        """Read from the socket. Returns why the rank is lost, or an empty string."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self.exit_reason()
        self.heard, self.started = time.monotonic(), True
        self._bytes += data
        while len(self._bytes) >= HEAD.size:
            end = HEAD.size + HEAD.unpack(self._bytes[: HEAD.size])[0]
            if len(self._bytes) < end:
                break
            try:
                answer = codec.decode(FromRank, bytes(self._bytes[HEAD.size : end])).answer
            except codec.WireError as error:
                return f"sent an invalid message: {error}"
            del self._bytes[:end]
            if not isinstance(answer, Beat):
                self.answer = answer
        return ""

    def is_silent(self, start_s: float, silent_s: float) -> bool:
        raise NotImplementedError

    def exit_reason(self) -> str:
        return "has closed its connection"

    def kill(self) -> None:
        """Make the rank end; does not wait for it."""
        raise NotImplementedError

    def end(self) -> None:
        """Release what belongs to the rank, after `kill`."""
        self.socket.close()


class LocalRank(RankConnection):
    """A rank whose process this trainer has started."""

    def __init__(self, rank: int, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(rank, ours)
        self._ticks, self._worked = 0, self.heard
        with theirs:
            self.popen = start_rank(theirs, rank, variables)

    def is_silent(self, start_s: float, silent_s: float) -> bool:
        """Return whether the rank is silent. Call it often: it compares processor time with that of the last call."""
        now = time.monotonic()
        if (ticks := _processor_ticks(self.popen.pid)) != self._ticks:
            self._ticks, self._worked = ticks, now
        still_s = now - max(self.heard, self._worked)
        return still_s > (silent_s if self.started else start_s) or now - self.heard > HUNG_S

    def exit_reason(self) -> str:
        try:
            return describe_exit(self.popen.wait(GRACE_S))
        except subprocess.TimeoutExpired:
            return super().exit_reason()

    def kill(self) -> None:
        self.popen.kill()

    def end(self) -> None:
        self.popen.wait()
        super().end()


class RemoteRank(RankConnection):
    """A rank of another trainer. Its process ends when the connection does."""

    def __init__(self, rank: int, connection: socket.socket, worker: str) -> None:
        super().__init__(rank, connection)
        self.worker = worker

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.worker}"

    def is_silent(self, start_s: float, silent_s: float) -> bool:
        return time.monotonic() - self.heard > (REMOTE_FACTOR * silent_s if self.started else start_s)

    def exit_reason(self) -> str:
        return "has closed its connection, or cannot be reached; see the log of its trainer"

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self.socket.shutdown(socket.SHUT_RDWR)


def _processor_ticks(pid: int) -> int:
    """Return the processor time of a process in ticks; always 0 without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[STAT_UTIME]) + int(fields[STAT_STIME])
