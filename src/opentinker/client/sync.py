"""`Client`: AsyncClient for code that does not use asyncio. Its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from opentinker.client.job_handle import JobHandle
from opentinker.client.sweep_handle import SweepHandle
from opentinker.sdk.client import AsyncClient, OnChange, print_change
from opentinker.sdk.http import ApiError, ExitExecutor
from opentinker.sdk.inputs import Spec, refuse_sweep
from opentinker.sdk.loop_thread import LoopThread
from opentinker.shared.api_types import Job

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Make a method of Client from one of AsyncClient, with its parameters and docstring."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(method(self._core, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """The same of a stream, which becomes an iterator."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._core, *args, **kwargs))

    return call


class Client:
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
        self._thread = LoopThread("opentinker-client", ExitExecutor(thread_name_prefix="opentinker-client"))
        self._finish = weakref.finalize(self, _stop, self._core, self._thread)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}{'' if self._finish.alive else ', closed'})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; calls after it raise."""
        self._finish()

    def start(
        self,
        spec: Spec,
        *,
        beside: str | Path | None = None,
        from_checkpoint: str | None = None,
        with_optimizer: bool = False,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """Submit a job, with the parameters of `submit`, and return it as an object. Raises ApiError if the spec is a
        sweep."""
        refuse_sweep(spec)
        made = self.submit(
            spec,
            beside=beside,
            from_checkpoint=from_checkpoint,
            with_optimizer=with_optimizer,
            idempotency_key=idempotency_key,
        )
        return JobHandle(self, made["id"])

    def start_sweep(
        self,
        spec: Spec,
        table: Mapping[str, Any] | None = None,
        *,
        beside: str | Path | None = None,
        idempotency_key: str | None = None,
    ) -> SweepHandle:
        """Submit a sweep, with the parameters of `sweep`, and return it as an object."""
        made = self.sweep(spec, table, beside=beside, idempotency_key=idempotency_key)
        return SweepHandle(self, made["id"])

    def sweep_handle(self, id: str) -> SweepHandle:
        """Return a sweep as an object. Raises ApiNotFound."""
        found = SweepHandle(self, id)
        found.refresh()
        return found

    def handle(self, id: str) -> JobHandle:
        """Return a job as an object. Raises ApiNotFound."""
        found = JobHandle(self, id)
        found.refresh()
        return found

    submit = blocking(AsyncClient.submit)
    jobs = blocking(AsyncClient.jobs)
    job_groups = blocking(AsyncClient.job_groups)
    label = blocking(AsyncClient.label)
    job = blocking(AsyncClient.job)
    cancel = blocking(AsyncClient.cancel)
    pause = blocking(AsyncClient.pause)
    resume = blocking(AsyncClient.resume)
    complete = blocking(AsyncClient.complete)
    validate = blocking(AsyncClient.validate)
    failures = blocking(AsyncClient.failures)
    chat = iterating(AsyncClient.chat)

    sweep = blocking(AsyncClient.sweep)
    sweeps = blocking(AsyncClient.sweeps)
    sweep_groups = blocking(AsyncClient.sweep_groups)
    label_sweep = blocking(AsyncClient.label_sweep)
    sweep_state = blocking(AsyncClient.sweep_state)
    wait_sweep = blocking(AsyncClient.wait_sweep)
    cancel_sweep = blocking(AsyncClient.cancel_sweep)
    delete_sweep = blocking(AsyncClient.delete_sweep)

    event_log = blocking(AsyncClient.event_log)
    events = iterating(AsyncClient.events)
    metrics = blocking(AsyncClient.metrics)
    watch_metrics = iterating(AsyncClient.watch_metrics)
    log_lines = blocking(AsyncClient.log_lines)
    logs = iterating(AsyncClient.logs)
    rollouts = blocking(AsyncClient.rollouts)
    job_models = blocking(AsyncClient.job_models)
    transcripts = blocking(AsyncClient.transcripts)
    distributions = blocking(AsyncClient.distributions)
    rows = blocking(AsyncClient.rows)
    timeline = blocking(AsyncClient.timeline)
    why = blocking(AsyncClient.why)
    stream_credentials = blocking(AsyncClient.stream_credentials)
    usage = blocking(AsyncClient.usage)

    checkpoints = blocking(AsyncClient.checkpoints)
    all_checkpoints = blocking(AsyncClient.all_checkpoints)
    has_all_checkpoints = blocking(AsyncClient.has_all_checkpoints)
    evaluations = blocking(AsyncClient.evaluations)
    artifacts = blocking(AsyncClient.artifacts)
    download = blocking(AsyncClient.download)
    download_artifacts = blocking(AsyncClient.download_artifacts)
    delete_artifacts = blocking(AsyncClient.delete_artifacts)
    publish = blocking(AsyncClient.publish)
    unpublish = blocking(AsyncClient.unpublish)
    published = blocking(AsyncClient.published)

    push_environment = blocking(AsyncClient.push_environment)
    environments = blocking(AsyncClient.environments)
    all_environments = blocking(AsyncClient.all_environments)
    environment = blocking(AsyncClient.environment)
    describe_environment = blocking(AsyncClient.describe_environment)
    delete_environment = blocking(AsyncClient.delete_environment)
    save_check = blocking(AsyncClient.save_check)
    environment_checks = blocking(AsyncClient.environment_checks)
    environment_check = blocking(AsyncClient.environment_check)
    delete_environment_check = blocking(AsyncClient.delete_environment_check)

    create_key = blocking(AsyncClient.create_key)
    share = blocking(AsyncClient.share)
    keys = blocking(AsyncClient.keys)
    rotate_key = blocking(AsyncClient.rotate_key)
    revoke_key = blocking(AsyncClient.revoke_key)
    sessions = blocking(AsyncClient.sessions)
    end_session = blocking(AsyncClient.end_session)
    whoami = blocking(AsyncClient.whoami)
    webhook_secret = blocking(AsyncClient.webhook_secret)
    tenants = blocking(AsyncClient.tenants)
    workers = blocking(AsyncClient.workers)
    free_worker = blocking(AsyncClient.free_worker)
    queues = blocking(AsyncClient.queues)

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

    wait.__doc__ = AsyncClient.wait.__doc__

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._finish.alive:
            coroutine.close()
            raise ApiError("this client is closed")
        return self._thread.call(coroutine)

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._call(following())) is not None:
                yield item
        finally:
            if self._finish.alive:
                self._call(items.aclose())


def _stop(core: AsyncClient, thread: LoopThread) -> None:
    thread.call(asyncio.wait_for(core.close(), 5.0))
    thread.end()
