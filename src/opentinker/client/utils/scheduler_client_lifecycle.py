"""Ends the jobs of a program when the program ends: normally, by an exception, by Ctrl-C, or by SIGTERM or SIGHUP."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Ends of a program that would skip its exit hooks. SIGINT is an exception already."""


class LifecycleManager:
    """At exit, ends registered jobs that are not over yet, then calls the callbacks."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Any, str]] = []
        self._callbacks: list[Callable[[], Any]] = []
        self._enabled = False

    def enable_auto_cleanup(self) -> None:
        """Registers `cleanup` as an exit hook. SIGTERM and SIGHUP become ordinary exits, unless the program handles or
        ignores them itself."""
        if self._enabled:
            return
        self._enabled = True
        weakref.finalize(
            self, int
        )  # registers weakref's own exit hook, which closes clients: hooks run last in, first out
        atexit.register(self.cleanup)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _exit)

    def register_job(self, client: Any, job_id: str) -> None:
        self._jobs.append((client, job_id))

    def add_cleanup_callback(self, function: Callable[[], Any]) -> None:
        self._callbacks.append(function)

    def start_reward_server(self, *_: Any, **__: Any) -> None:
        """Refused: rewards come from the game's step()."""
        raise NotImplementedError("start_reward_server: rewards come from the game's step() here; put them there")

    def cleanup(self) -> None:
        """Runs once; an error is printed and does not stop the rest."""
        jobs, self._jobs = self._jobs, []
        callbacks, self._callbacks = self._callbacks, []
        for client, job in jobs:
            self._try(lambda client=client, job=job: _end(client, job), f"job {job}")  # type: ignore[misc]
        for callback in callbacks:
            self._try(callback, getattr(callback, "__name__", "a callback"))

    @staticmethod
    def _try(function: Callable[[], Any], what: str) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the program is ending: the next one must have its turn
            sys.stderr.write(f"cleaning up {what}: {error}\n")


def _end(client: Any, job: str) -> None:
    if hasattr(client, "hurry"):
        client.hurry()
    ended = client.complete_job(job)
    if isinstance(ended, Mapping) and ended.get("status") == "CANCELLED" and "id" in ended:
        sys.stderr.write(f"job {ended['id']} was cancelled, because its program ended\n")


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


_manager: LifecycleManager | None = None


def get_lifecycle_manager() -> LifecycleManager:
    """The program's one; it cleans up at exit."""
    global _manager  # noqa: PLW0603 - the published interface is a singleton
    if _manager is None:
        _manager = LifecycleManager()
        _manager.enable_auto_cleanup()
    return _manager
