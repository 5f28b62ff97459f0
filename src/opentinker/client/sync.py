"""`Client`: AsyncClient for code that does not use asyncio. Its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from opentinker.sdk.artifacts import FetchingSync
from opentinker.sdk.client import POLL_S, AsyncClient, OnChange, print_change
from opentinker.sdk.http import ApiError, ExitExecutor, Json
from opentinker.sdk.inputs import Spec
from opentinker.sdk.keys import GrantingSync
from opentinker.sdk.loop_thread import call_in_loop
from opentinker.sdk.observability import KnowingSync
from opentinker.shared.api_types import (
    Environment,
    EnvironmentSummary,
    Event,
    Failures,
    Job,
    JobSummary,
    MetricPoint,
    PushedEnvironment,
    Queue,
    Transcripts,
    Worker,
)

T = TypeVar("T")


def documented_by(original: type) -> Callable[[type[T]], type[T]]:
    """Copy the docstrings of `original` to the methods of the same names that have none."""

    def document(kind: type[T]) -> type[T]:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and not method.__doc__:
                method.__doc__ = inspect.getdoc(getattr(original, name))
        return kind

    return document


@documented_by(AsyncClient)
class Client(FetchingSync, GrantingSync, KnowingSync):
    """The HTTP API from Python, each call blocking; streams are iterators.

    `url` defaults to OPENTINKER_URL, `api_key` to OPENTINKER_API_KEY, to the content of OPENTINKER_API_KEY_FILE, or to
    the key of a server that was started in this directory. `wait_s`: how long a server that is away is waited for.
    `on_wait(sentence)` is called while it is; default: it is logged.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        wait_s: float = 10.0,
        timeout_s: float = 30.0,
        on_wait: Callable[[str], None] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._core: AsyncClient = AsyncClient(url, wait_s=wait_s, timeout_s=timeout_s, on_wait=on_wait, api_key=api_key)
        self.url, self.http = self._core.url, self._core._http
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ExitExecutor(thread_name_prefix="opentinker-client"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="opentinker-client", daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, _stop, self._core, self._loop, self._thread)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}{'' if self._finish.alive else ', closed'})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._finish()

    def submit(
        self,
        spec: Spec,
        *,
        beside: str | Path | None = None,
        from_checkpoint: str | None = None,
        with_optimizer: bool = False,
        idempotency_key: str | None = None,
    ) -> JobSummary:
        return self._call(
            self._core.submit(
                spec,
                beside=beside,
                from_checkpoint=from_checkpoint,
                with_optimizer=with_optimizer,
                idempotency_key=idempotency_key,
            )
        )

    def jobs(
        self,
        limit: int = 100,
        *,
        states: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        name: str | None = None,
    ) -> list[JobSummary]:
        return self._call(self._core.jobs(limit, states=states, kinds=kinds, name=name))

    def job(self, id: str) -> Job:
        return self._call(self._core.job(id))

    def cancel(self, id: str) -> JobSummary:
        return self._call(self._core.cancel(id))

    def pause(self, id: str) -> JobSummary:
        return self._call(self._core.pause(id))

    def resume(self, id: str) -> JobSummary:
        return self._call(self._core.resume(id))

    def failures(self, id: str, limit: int = 100) -> Failures:
        return self._call(self._core.failures(id, limit))

    def complete(self, id: str) -> JobSummary:
        return self._call(self._core.complete(id))

    def chat(self, id: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[Json]:
        return self._iterate(self._core.chat(id, messages, **options))

    def wait(
        self,
        id: str,
        timeout_s: float | None = None,
        *,
        cancel_on_interrupt: bool = False,
        on_change: OnChange | None = None,
    ) -> Job:
        told = on_change or print_change
        try:
            for job in self._iterate(self._core._changes(id, timeout_s)):
                told(job)  # in the caller's thread: it may use this client
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                self.cancel(id)
            raise
        return job

    def event_log(self, id: str, after: str = "0") -> list[Event]:
        return self._call(self._core.event_log(id, after))

    def events(self, id: str, after: str = "0") -> Iterator[Event]:
        return self._iterate(self._core.events(id, after))

    def metrics(
        self, id: str, after: int = 0, *, source: str | None = None, names: list[str] | None = None
    ) -> list[MetricPoint]:
        return self._call(self._core.metrics(id, after, source=source, names=names))

    def watch_metrics(self, id: str, after: int = 0, *, poll_s: float = POLL_S) -> Iterator[MetricPoint]:
        return self._iterate(self._core.watch_metrics(id, after, poll_s=poll_s))

    def transcripts(self, id: str, step: int | None = None) -> Transcripts:
        return self._call(self._core.transcripts(id, step))

    def push_environment(self, directory: str | Path, name: str | None = None) -> PushedEnvironment:
        return self._call(self._core.push_environment(directory, name))

    def environments(self) -> list[EnvironmentSummary]:
        return self._call(self._core.environments())

    def environment(self, name: str) -> Environment:
        return self._call(self._core.environment(name))

    def delete_environment(self, name: str, version: int | None = None) -> list[int]:
        return self._call(self._core.delete_environment(name, version))

    def workers(self) -> list[Worker]:
        return self._call(self._core.workers())

    def queues(self) -> list[Queue]:
        return self._call(self._core.queues())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._finish.alive:
            coroutine.close()
            raise ApiError("this client is closed")
        return call_in_loop(coroutine, self._loop)

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._call(following())) is not None:
                yield item
        finally:
            if self._finish.alive:
                self._call(items.aclose())


def _stop(core: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(core.close(), loop).result(5.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5.0)
    loop.close()
