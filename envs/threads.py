"""Runs user code in separate threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a call in a new daemon thread: a call that never ends neither fills a pool nor delays process exit. Every
    exception, SystemExit included, is raised where the future is awaited."""
    loop = asyncio.get_running_loop()
    coming: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if coming.done():
            return
        if error is not None:
            coming.set_exception(error)
        else:
            coming.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            ended = partial(settle, call(), None)
        except BaseException as error:  # noqa: BLE001 - user code; raised again in the loop
            raised: BaseException = error
            if isinstance(error, StopIteration):  # no future holds one
                raised = RuntimeError("StopIteration was raised")
                raised.__cause__ = error
            ended = partial(settle, None, raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=run, name=name, daemon=True).start()
    return coming
