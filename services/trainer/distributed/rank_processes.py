"""The other ranks as rank 0 sees them: processes that it starts, commands, feeds with work, watches and ends.

    run     consumes a command          produces its outcome     waits for every rank and our own part
    watch   consumes answers and beats  produces answers, losses waits for the next byte, or the next second
    work    consumes our own parts      produces their outcomes  waits for the next one

Our own part of a command runs in a thread of its own, because a collective whose other members are gone may wait long:
`run` raises as soon as one of them is lost. That thread has started the processes too: the kernel ends them with it.
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

OURS = "OPENTINKER_"
"""Settings of this service, the addresses of NATS and Redis among them, are not for the ranks."""
START_S = 120.0
"""From the start of a process to its first beat: it imports torch meanwhile."""
SILENT_S = 20.0
"""A rank is lost that has neither beaten nor used its processor for so long: it is stopped. One that waits for a disk
beats on; one on a machine with much else to do comes late to its beats, and is waited for too..."""
HUNG_S = 600.0
"""...up to here: what works on without ever beating hangs."""
LOOK_S = 0.5
GRACE_S = 3.0
"""When one part of a command has failed, the others have so long to say why."""
CLOSE_S = 30.0
STAT_UTIME, STAT_STIME = 11, 12
"""Of the fields of /proc/PID/stat after the name: see proc(5)."""


class RankLost(OpenTinkerError):
    """A rank died, hangs or has crashed. The trainer ends; the job goes on from its newest checkpoint."""


class _Process:
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
                stdout=2,  # what libraries print goes into the trainer's log
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if not name.startswith(OURS)} | variables,
            )

    def receive(self) -> str:
        """Takes in what has come. Returns why the process is lost, or nothing."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return self._how_it_ended()
        self._heard, self._started = time.monotonic(), True
        self._bytes += data
        while len(self._bytes) >= HEAD.size:
            end = HEAD.size + HEAD.unpack(self._bytes[: HEAD.size])[0]
            if len(self._bytes) < end:
                break
            try:
                answer = codec.decode(FromRank, bytes(self._bytes[HEAD.size : end])).answer
            except codec.WireError as error:
                return f"does not speak our language: {error}"
            del self._bytes[:end]
            if not isinstance(answer, Beat):
                self.answer = answer
        return ""

    def is_silent(self) -> bool:
        """Asked often: it compares the processor time with that of the last call."""
        now = time.monotonic()
        if (ticks := _processor_ticks(self.popen.pid)) != self._ticks:
            self._ticks, self._worked = ticks, now
        still_s = now - max(self._heard, self._worked)
        return still_s > (SILENT_S if self._started else START_S) or now - self._heard > HUNG_S

    def _how_it_ended(self) -> str:
        try:
            status = self.popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def end(self) -> None:
        self.popen.wait()
        self.socket.close()


class RankProcesses:
    """`variables(rank)`: environment variables of that rank's process."""

    def __init__(self, world: int, variables: Callable[[int], dict[str, str]]) -> None:
        self._turn = threading.Condition()
        self._lost = ""
        self._told = False
        """Somebody was told that the ranks are of no use any more, and why."""
        self._closed = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._parts: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._processes: list[_Process] = []
        self._worker = threading.Thread(target=self._work, name="rank-0", daemon=True)
        self._worker.start()

        def start() -> None:
            for rank in range(1, world):
                self._processes.append(_Process(rank, variables(rank)))

        self._watcher = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        _, error = self._own(start)
        if error is not None:
            self.close(lambda: None)
            raise error
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def run(self, command: Command, part: Callable[[], T]) -> T:
        """Every rank obeys `command` while this one does `part`; returns what that returns.

        Raises JobFailed, NonFinite or Interrupted if that is what all ranks do, JobFailed if one of them does, RankLost
        if one is gone, and at once Interrupted of our part alone. Unless all did alike, the ranks are of no use any
        more.
        """
        message = frame(ToRank(command))

        def together() -> T:
            for process in self._processes:
                process.socket.sendall(message)
            return part()

        for process in self._processes:
            process.answer = None
        value, error = self._own(together, wait_for_all=True)
        refusals = [p.answer for p in self._processes if isinstance(p.answer, StepRefused)]
        if error is None and not refusals:
            return value  # type: ignore[no-any-return]
        if not (isinstance(error, JobFailed | Interrupted) and len(refusals) == len(self._processes)):
            self._lose("a command has failed")
            self._told = True
        if isinstance(error, NonFinite) and any(refusal.finite for refusal in refusals):
            raise JobFailed(str(error))
        if error is not None:
            raise error
        raise JobFailed(refusals[0].why)

    def close(self, leave: Callable[[], None]) -> None:
        """Ends every process, then does `leave` in our own thread. Idempotent.

        Raises OpenTinkerError if our own part of a command does not let go and nothing was raised before that says why
        the ranks are lost: that is what ends the work, and what shall be read.
        """
        if self._closed:
            return
        self._closed = True
        self._lose("the job has been let go")
        for process in self._processes:
            process.popen.kill()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self._processes:
            process.end()
        self._parts.put(leave)
        self._parts.put(None)
        self._worker.join(CLOSE_S)
        if self._worker.is_alive():
            why = "rank 0 still waits for ranks that are gone: this trainer must be started again"
            if not self._told:
                raise OpenTinkerError(why)
            log.error("ranks_not_left", why=why)

    def _own(self, part: Callable[[], Any], *, wait_for_all: bool = False) -> tuple[Any, BaseException | None]:
        """What `part` returned or raised in our own thread. Raises RankLost."""
        with self._turn:
            self._outcome = None
            self._parts.put(part)
            grace: float | None = None
            while True:
                if self._lost:
                    self._told |= not self._closed
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
                self._turn.wait(LOOK_S)

    def _work(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                outcome: tuple[Any, BaseException | None] = (part(), None)
            except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
                outcome = (None, error)
            with self._turn:
                self._outcome = outcome
                self._turn.notify_all()
            del part, outcome

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.socket, selectors.EVENT_READ, process)
            while not self._lost:
                for key, _ in selector.select(LOOK_S):
                    if why := key.data.receive():
                        self._lose(f"rank {key.data.rank} {why}")
                for process in self._processes:
                    if process.is_silent():
                        self._lose(f"rank {process.rank} has been silent for too long: it is stopped, or hangs")
                with self._turn:
                    self._turn.notify_all()

    def _lose(self, why: str) -> None:
        with self._turn:
            self._lost = self._lost or why
            self._turn.notify_all()


def _processor_ticks(pid: int) -> int:
    """That a process has used; always 0 where /proc does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[STAT_UTIME]) + int(fields[STAT_STIME])


def _left_behind(error: BaseException | None) -> bool:
    """Our part was given up, and the others, who know nothing of it, would wait for us."""
    return isinstance(error, Interrupted) and not error.alike
