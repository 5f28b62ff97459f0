"""Starts, commands, monitors and ends the processes of ranks 1 ... N-1, from rank 0.

    run     consumes a command               produces its outcome       waits for every rank and rank 0's own part
    watch   consumes answers and heartbeats  produces answers, losses   waits for the next byte, or the next second
    work    consumes rank 0's own parts      produces their outcomes    waits for the next part

Rank 0's own part of a command runs in a separate thread, because a collective whose other members are gone may block
for long: `run` raises as soon as one of them is lost. That thread also starts the processes: the kernel ends them with
it.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from opentinker.services.trainer.distributed.rank_protocol import (
    HEAD,
    Answer,
    Beat,
    Command,
    FromRank,
    StepRefused,
    ToRank,
    frame,
)
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from opentinker.shared.types import codec
from opentinker.shared.types.errors import JobFailed, OpenTinkerError

log = structlog.get_logger()
T = TypeVar("T")

SETTINGS_PREFIX = "OPENTINKER_"
"""Prefix of this service's settings, such as the addresses of NATS and Redis, which ranks do not receive."""
HUNG_S = 600.0
"""A process that works this long without a heartbeat hangs."""
POLL_S = 0.5
GRACE_S = 3.0
"""After one part of a command has failed, the others have this long to report their reasons."""
STAT_UTIME, STAT_STIME = 11, 12
"""Indices in /proc/PID/stat, counted after the process name: see proc(5)."""


class RankLost(OpenTinkerError):
    """A rank died, hangs or has crashed. The trainer ends; the job continues from its newest checkpoint."""


class _RankProcess:
    """One rank's process and the socket to it."""

    def __init__(self, rank: int, variables: dict[str, str]) -> None:
        self.rank = rank
        self.answer: Answer | None = None
        self._heard, self._started = time.monotonic(), False
        self._ticks, self._worked = 0, self._heard
        self._bytes = bytearray()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "opentinker.services.trainer.distributed.rank_main",
                    str(theirs.fileno()),
                    str(rank),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of libraries goes to the trainer's log
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if not name.startswith(SETTINGS_PREFIX)}
                | variables,
            )

    def receive(self) -> str:
        """Read from the socket. Returns why the process is lost, or an empty string."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return self._exit_reason()
        self._heard, self._started = time.monotonic(), True
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
        """Return whether the rank is silent. Call it often: it compares processor time with that of the last call."""
        now = time.monotonic()
        if (ticks := _processor_ticks(self.popen.pid)) != self._ticks:
            self._ticks, self._worked = ticks, now
        still_s = now - max(self._heard, self._worked)
        return still_s > (silent_s if self._started else start_s) or now - self._heard > HUNG_S

    def _exit_reason(self) -> str:
        try:
            status = self.popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def end(self) -> None:
        self.popen.wait()
        self.socket.close()


class RankProcesses:
    """`variables(rank)`: environment variables of that rank's process.

    A rank without heartbeat and processor time for `silent_s` is lost: it is stopped. A rank that waits for a disk
    still sends heartbeats; on a busy machine heartbeats are late, but processor time advances. Until its first
    heartbeat a process has `start_s`: it imports torch first.
    """

    def __init__(
        self,
        world: int,
        variables: Callable[[int], dict[str, str]],
        *,
        start_s: float = 120.0,
        silent_s: float = 20.0,
        close_s: float = 30.0,
    ) -> None:
        self.start_s, self.silent_s, self.close_s = start_s, silent_s, close_s
        self._condition = threading.Condition()
        self._lost = ""
        self._reported = False
        """An exception has already reported why the ranks are unusable."""
        self._closed = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._parts: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._processes: list[_RankProcess] = []
        self._worker = threading.Thread(target=self._work_loop, name="rank-0", daemon=True)
        self._worker.start()

        def start() -> None:
            for rank in range(1, world):
                self._processes.append(_RankProcess(rank, variables(rank)))

        self._watcher = threading.Thread(target=self._watch_loop, name="watch-ranks", daemon=True)
        _, error = self._run_own(start)
        if error is not None:
            self.close(lambda: None)
            raise error
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def run(self, command: Command, part: Callable[[], T]) -> T:
        """Execute `command` on every other rank while this one runs `part`; returns the result of `part`.

        Raises JobFailed, NonFinite or Interrupted if all ranks do, JobFailed if one of them does, RankLost if one is
        gone, and immediately Interrupted if only `part` raises it. Unless all ranks raise alike, they are unusable
        afterwards.
        """
        message = frame(ToRank(command))

        def together() -> T:
            for process in self._processes:
                process.socket.sendall(message)
            return part()

        for process in self._processes:
            process.answer = None
        value, error = self._run_own(together, wait_for_all=True)
        refusals = [p.answer for p in self._processes if isinstance(p.answer, StepRefused)]
        if error is None and not refusals:
            return value  # type: ignore[no-any-return]
        if not (isinstance(error, JobFailed | Interrupted) and len(refusals) == len(self._processes)):
            self._mark_lost("a command has failed")
            self._reported = True
        if isinstance(error, NonFinite) and any(refusal.finite for refusal in refusals):
            raise JobFailed(str(error))
        if error is not None:
            raise error
        raise JobFailed(refusals[0].why)

    def close(self, leave: Callable[[], None]) -> None:
        """End every process, then run `leave` in the worker thread. Idempotent.

        Raises OpenTinkerError if rank 0's part of a command does not return and no earlier exception reported why the
        ranks are lost; such an exception takes precedence.
        """
        if self._closed:
            return
        self._closed = True
        self._mark_lost("the job was released")
        for process in self._processes:
            process.popen.kill()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self._processes:
            process.end()
        self._parts.put(leave)
        self._parts.put(None)
        self._worker.join(self.close_s)
        if self._worker.is_alive():
            why = "rank 0 still waits for ranks that are gone: this trainer must be started again"
            if not self._reported:
                raise OpenTinkerError(why)
            log.error("ranks_not_stopped", why=why)

    def _run_own(self, part: Callable[[], Any], *, wait_for_all: bool = False) -> tuple[Any, BaseException | None]:
        """Run `part` in the worker thread; returns its result or exception. Raises RankLost."""
        with self._condition:
            self._outcome = None
            self._parts.put(part)
            grace: float | None = None
            while True:
                if self._lost:
                    self._reported |= not self._closed
                    raise RankLost(f"{self._lost}; the trainer starts again from the newest checkpoint")
                answers = [p.answer for p in self._processes] if wait_for_all else []
                if self._outcome is not None and all(answer is not None for answer in answers):
                    return self._outcome
                if self._outcome is not None and _left_behind(self._outcome[1]):
                    return self._outcome
                failed = (self._outcome is not None and self._outcome[1] is not None) or any(
                    isinstance(answer, StepRefused) for answer in answers
                )
                if failed:
                    grace = grace or time.monotonic() + GRACE_S
                    if time.monotonic() > grace:
                        return self._outcome or (None, None)
                self._condition.wait(POLL_S)

    def _work_loop(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                outcome: tuple[Any, BaseException | None] = (part(), None)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                outcome = (None, error)
            with self._condition:
                self._outcome = outcome
                self._condition.notify_all()
            del part, outcome

    def _watch_loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.socket, selectors.EVENT_READ, process)
            while not self._lost:
                for key, _ in selector.select(POLL_S):
                    if why := key.data.receive():
                        self._mark_lost(f"rank {key.data.rank} {why}")
                for process in self._processes:
                    if process.is_silent(self.start_s, self.silent_s):
                        self._mark_lost(f"rank {process.rank} has been silent for too long: it is stopped, or hangs")
                with self._condition:
                    self._condition.notify_all()

    def _mark_lost(self, why: str) -> None:
        with self._condition:
            self._lost = self._lost or why
            self._condition.notify_all()


def _processor_ticks(pid: int) -> int:
    """Return the processor time of a process in ticks; always 0 without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[STAT_UTIME]) + int(fields[STAT_STIME])


def _left_behind(error: BaseException | None) -> bool:
    """Return whether only rank 0's part was interrupted, so that the other ranks would wait for it."""
    return isinstance(error, Interrupted) and not error.alike
