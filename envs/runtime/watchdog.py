"""Ends the process when an environment blocks the event loop, which it must not do (envs/base.py).

While the loop is blocked no session advances and no heartbeat is sent, and nothing in Python can stop the call. So the
log names the environment, the process exits, and its sessions are lost and played elsewhere.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
import traceback

import structlog

from opentinker.shared.asyncio_tools import sleep

log = structlog.get_logger()


async def watch(limit_s: float) -> None:
    """Watch the loop; never returns. After `limit_s` without progress every thread's stack goes to stderr and the
    process exits with code 1. This is done in C, so it works even if the call holds the interpreter's lock. Half-way
    the log names the culprit."""
    pulse = Pulse(limit_s / 2)
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            pulse.at = time.monotonic()
            await sleep(limit_s / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
        pulse.ended.set()


class Pulse:
    """Notices from a separate thread that the loop is blocked for `limit_s`, and logs once what it is running."""

    def __init__(self, limit_s: float) -> None:
        self.at = time.monotonic()
        self.ended = threading.Event()
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def _look(self) -> None:
        told = 0.0
        while not self.ended.wait(self._limit_s / 5):
            at = self.at
            if at != told and time.monotonic() - at >= self._limit_s:
                told = at
                task = asyncio.current_task(self._loop)
                log.critical(
                    "event_loop_blocked",
                    by=task.get_name() if task is not None else "no task",
                    seconds=self._limit_s,
                    stack="".join(traceback.format_stack(sys._current_frames().get(self._thread), limit=4)),
                )
