"""Threads for calls that may take minutes, shared by all tenants, of which each has a few."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")


class TooManyCalls(OpenTinkerError):
    """The tenant has as many unfinished calls as it may."""


class TenantThreads:
    """Runs calls in up to `threads` threads, at most `per_tenant` for one tenant. Calls that wait for a thread count,
    and so do abandoned ones: a running thread cannot be stopped from outside."""

    def __init__(self, threads: int, per_tenant: int, name: str) -> None:
        self.per_tenant = per_tenant
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._unfinished: Counter[str] = Counter()

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        """Raises TooManyCalls."""
        with self._lock:
            if self._unfinished[tenant] >= self.per_tenant:
                raise TooManyCalls(f"{self.per_tenant} calls of tenant {tenant} are unfinished")
            self._unfinished[tenant] += 1
        future = self._pool.submit(call)
        future.add_done_callback(partial(self._finish, tenant))
        return future

    def _finish(self, tenant: str, _: Future[Any]) -> None:
        with self._lock:
            self._unfinished[tenant] -= 1
            if not self._unfinished[tenant]:
                del self._unfinished[tenant]
