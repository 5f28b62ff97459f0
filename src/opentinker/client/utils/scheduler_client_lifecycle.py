"""Jobs that end with the program which began them, unless it was only interrupted by its own death."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


class LifecycleManager:
    """When the program ends, registered jobs are cancelled (one that is over is left alone) and callbacks called."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Any, str]] = []
        self._callbacks: list[Callable[[], Any]] = []
        self._enabled = False

    def enable_auto_cleanup(self) -> None:
        """At exit; SIGTERM becomes an ordinary exit, so that it comes to that."""
        if self._enabled:
            return
        self._enabled = True
        atexit.register(self.cleanup)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def register_job(self, client: Any, job_id: str) -> None:
        self._jobs.append((client, job_id))

    def add_cleanup_callback(self, function: Callable[[], Any]) -> None:
        self._callbacks.append(function)

    def start_reward_server(self, *_: Any, **__: Any) -> None:
        """Refused: rewards come from the game's step()."""
        raise NotImplementedError("start_reward_server: rewards come from the game's step() here; put them there")

    def cleanup(self) -> None:
        """Once; what fails is told, and does not stop the rest."""
        jobs, self._jobs = self._jobs, []
        callbacks, self._callbacks = self._callbacks, []
        for client, job in jobs:
            self._try(lambda client=client, job=job: client.complete_job(job), f"job {job}")  # type: ignore[misc]
        for callback in callbacks:
            self._try(callback, getattr(callback, "__name__", "a callback"))

    @staticmethod
    def _try(function: Callable[[], Any], what: str) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the program is ending: the next one must have its turn
            sys.stderr.write(f"cleaning up {what}: {error}\n")


_manager: LifecycleManager | None = None


def get_lifecycle_manager() -> LifecycleManager:
    """The program's one; it cleans up at exit."""
    global _manager  # noqa: PLW0603 - the published interface is a singleton
    if _manager is None:
        _manager = LifecycleManager()
        _manager.enable_auto_cleanup()
    return _manager
