"""Starts, commands, monitors and ends ranks 1 ... N-1, from rank 0. Those of other trainers (`rank_listener.py`) are
started there.

    run     consumes a command               produces its outcome       waits for every rank and rank 0's own part
    watch   consumes answers and heartbeats  produces answers, losses   waits for the next byte, or the next second
    work    consumes rank 0's own parts      produces their outcomes    waits for the next part

Rank 0's own part of a command runs in a separate thread, because a collective whose other members are gone may block
for long: `run` raises as soon as one of them is lost. That thread also starts the processes: the kernel ends them with
it.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from opentinker.services.trainer.distributed.rank_connections import LocalRank, RankConnection, RankLost
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.services.trainer.distributed.rank_protocol import Command, StepRefused, ToRank, frame
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from opentinker.shared.types.errors import JobFailed, OpenTinkerError

log = structlog.get_logger()
T = TypeVar("T")

POLL_S = 0.5
GRACE_S = 3.0
"""After one part of a command has failed, the others have this long to report their reasons."""


class RankProcesses:
    """`variables(rank)`: environment variables of that rank's process. `listener`: for the ranks of other trainers.

    A rank without heartbeat and processor time for `silent_s` is lost: it is stopped. A rank that waits for a disk
    still sends heartbeats; on a busy machine heartbeats are late, but processor time advances. Until its first
    heartbeat a process has `start_s`: it imports torch first.
    """

    def __init__(
        self,
        world: int,
        variables: Callable[[int], dict[str, str]],
        listener: RankListener | None = None,
        *,
        start_s: float = 120.0,
        silent_s: float = 20.0,
        close_s: float = 30.0,
    ) -> None:
        self.start_s, self.silent_s, self.close_s = start_s, silent_s, close_s
        self._condition = threading.Condition()
        self._lost: RankLost | None = None
        self._reported = False
        """An exception has already reported why the ranks are unusable."""
        self._closed = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._parts: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ranks: list[RankConnection] = []
        self._worker = threading.Thread(target=self._work_loop, name="rank-0", daemon=True)
        self._worker.start()

        def start() -> None:
            for rank in range(1, world if listener is None else listener.local):
                self._ranks.append(LocalRank(rank, variables(rank)))
            if listener is not None:
                self._ranks += listener.accept(start_s)

        self._watcher = threading.Thread(target=self._watch_loop, name="watch-ranks", daemon=True)
        _, error = self._run_own(start)
        if error is not None:
            self.close(lambda: None)
            raise error
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [rank.popen.pid for rank in self._ranks if isinstance(rank, LocalRank)]

    def run(self, command: Command, part: Callable[[], T]) -> T:
        """Execute `command` on every other rank while this one runs `part`; returns the result of `part`.

        Raises JobFailed, NonFinite or Interrupted if all ranks do, JobFailed if one of them does, RankLost if one is
        gone, and immediately Interrupted if only `part` raises it. Unless all ranks raise alike, they are unusable
        afterwards.
        """
        message = frame(ToRank(command))

        def together() -> T:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it is lost, which the watcher sees too
                    rank.socket.sendall(message)
            return part()

        for rank in self._ranks:
            rank.answer = None
        value, error = self._run_own(together, wait_for_all=True)
        refusals = [rank.answer for rank in self._ranks if isinstance(rank.answer, StepRefused)]
        if error is None and not refusals:
            return value  # type: ignore[no-any-return]
        if not (isinstance(error, JobFailed | Interrupted) and len(refusals) == len(self._ranks)):
            self._mark_lost(RankLost("a command has failed"))
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
        self._mark_lost(RankLost("the job was released"))
        for rank in self._ranks:
            rank.kill()
        if self._watcher.is_alive():
            self._watcher.join()
        for rank in self._ranks:
            rank.end()
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
                    raise self._lost
                answers = [rank.answer for rank in self._ranks] if wait_for_all else []
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
            for rank in self._ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            while not self._lost:
                for key, _ in selector.select(POLL_S):
                    rank = key.data
                    if why := rank.receive():
                        self._mark_lost(RankLost(f"{rank.name} {why}", rank.worker))
                for rank in self._ranks:
                    if rank.is_silent(self.start_s, self.silent_s):
                        why = "has been silent for too long: it is stopped, or hangs"
                        self._mark_lost(RankLost(f"{rank.name} {why}", rank.worker))
                with self._condition:
                    self._condition.notify_all()

    def _mark_lost(self, why: RankLost) -> None:
        with self._condition:
            self._lost = self._lost or why
            self._condition.notify_all()


def _left_behind(error: BaseException | None) -> bool:
    """Return whether only rank 0's part was interrupted, so that the other ranks would wait for it."""
    return isinstance(error, Interrupted) and not error.alike
