"""The HTTP API from Python. `AsyncClient` does the work; `Client` (client/sync.py) is the same without `await`.

    from opentinker import Client

    with Client("http://127.0.0.1:8080") as client:
        job = client.submit("job.toml")
        print(client.wait(job["id"])["state"])
        client.download(job["id"], "my-model")

Idempotent requests are retried, with jitter, while the server is away (`wait_s`): every GET, `submit` (it carries an
Idempotency-Key), `cancel`, `pause` and `resume`. Users are told what is waited for, with the URL: at the first failed
try, or when no answer arrives.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from opentinker.sdk.artifacts import ArtifactCalls, path_of, query_of
from opentinker.sdk.environments import EnvironmentCalls
from opentinker.sdk.handles import AsyncJobHandle, AsyncSweepHandle
from opentinker.sdk.http import ApiConflict, ApiError, ApiNotFound, Http, resource
from opentinker.sdk.inference import InferenceCalls
from opentinker.sdk.inputs import Spec, prepared, refers_to_checkpoints, refuse_sweep, started
from opentinker.sdk.job_text import state_of
from opentinker.sdk.keys import KeyCalls
from opentinker.sdk.labels import label_changes, list_query
from opentinker.sdk.observability import ObservabilityCalls
from opentinker.sdk.record_view import FINAL
from opentinker.sdk.sweeps import SweepCalls
from opentinker.shared.api_types import (
    Event,
    Events,
    Failures,
    Job,
    JobGroup,
    JobGroups,
    JobSummary,
    MetricPoint,
    Queue,
    Queues,
    SweepSummary,
    Transcripts,
    Worker,
    Workers,
)
from opentinker.shared.types.core import JobState
from opentinker.shared.types.sweeps import is_sweep

__all__ = ["ApiConflict", "ApiError", "ApiNotFound", "AsyncClient"]

SUBMIT_S = 720.0
"""Least time limit of a submission for which the server may copy checkpoints."""
POLL_S = 0.5
PAGE = 5000


OnChange = Callable[[Job], object]


class AsyncClient(EnvironmentCalls, ArtifactCalls, KeyCalls, InferenceCalls, ObservabilityCalls, SweepCalls):
    """`url` defaults to OPENTINKER_URL, `api_key` to OPENTINKER_API_KEY, to the content of OPENTINKER_API_KEY_FILE, or
    to the key of a server that was started in this directory. `on_wait(sentence)` is called when the server is not
    reached, or does not answer; default: it is logged."""

    def __init__(
        self,
        url: str | None = None,
        *,
        wait_s: float = 10.0,
        timeout_s: float = 30.0,
        on_wait: Callable[[str], None] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._http = Http(url, wait_s, timeout_s, on_wait, api_key)
        self.url = self._http.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls after it raise."""
        await self._http.close()

    # --- jobs ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        spec: Spec,
        *,
        beside: str | Path | None = None,
        from_checkpoint: str | None = None,
        with_optimizer: bool = False,
        idempotency_key: str | None = None,
    ) -> JobSummary | SweepSummary:
        """A spec, or the path of a .toml or .json file. Raises ApiError with every mistake.

        A spec with `kind = "sweep"` or a table [sweep] is submitted as `sweep` would, and the sweep is returned.

        Relative paths of the spec are looked for in the current directory, then in `beside` (default: the directory of
        the file), if the server runs on the same machine; otherwise, and if nothing is found, they are the server's.
        `from_checkpoint`, JOB@STEP or JOB@latest, and `with_optimizer` replace the spec's [start].
        """
        data = started(await prepared(self._http, spec, beside), from_checkpoint, with_optimizer)
        if is_sweep(data):
            return await self._submit_sweep(data, idempotency_key)
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        limit_s = max(self._http.timeout_s, SUBMIT_S) if refers_to_checkpoints(data) else self._http.timeout_s
        return await self._http.json(JobSummary, "POST", "/v1/jobs", noun=data, headers=headers, timeout_s=limit_s)

    async def start(
        self,
        spec: Spec,
        *,
        beside: str | Path | None = None,
        from_checkpoint: str | None = None,
        with_optimizer: bool = False,
        idempotency_key: str | None = None,
    ) -> AsyncJobHandle:
        """Submit a job, with the parameters of `submit`, and return it as an object. Raises ApiError if the spec is a
        sweep."""
        refuse_sweep(spec)
        made = await self.submit(
            spec,
            beside=beside,
            from_checkpoint=from_checkpoint,
            with_optimizer=with_optimizer,
            idempotency_key=idempotency_key,
        )
        return await self.handle(made["id"])

    async def handle(self, id: str) -> AsyncJobHandle:
        """Return a job as an object. Raises ApiNotFound."""
        return AsyncJobHandle(self, await self.job(id))

    async def start_sweep(
        self,
        spec: Spec,
        table: Mapping[str, Any] | None = None,
        *,
        beside: str | Path | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSweepHandle:
        """Submit a sweep, with the parameters of `sweep`, and return it as an object."""
        made = await self.sweep(spec, table, beside=beside, idempotency_key=idempotency_key)
        return await self.sweep_handle(made["id"])

    async def sweep_handle(self, id: str) -> AsyncSweepHandle:
        """Return a sweep as an object. Raises ApiNotFound."""
        return AsyncSweepHandle(self, await self.sweep_state(id))

    async def jobs(
        self,
        limit: int = 100,
        *,
        states: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        name: str | None = None,
        notes: str | None = None,
        project: str | None = None,
        tags: Collection[str] | None = None,
        environment: str | None = None,
        model: str | None = None,
        owner: str | None = None,
        search: str | None = None,
        sort: str | None = None,
    ) -> list[JobSummary]:
        """The first `limit` jobs, newest first or by `sort` (`state`: the running first, `-step`, ...): those in one of
        `states`, of one of `kinds`, with `name` in their name and `notes` in their notes, in `project`, with all
        `tags`, with this environment, model and owner (the id of a key), and with all words of `search`. Filters look
        at the newest 10,000 jobs."""
        lists = {"state": states, "kind": kinds, "tag": tags}
        texts = {"name": name, "notes": notes, "project": project}
        texts |= {"environment": environment, "model": model, "owner": owner}
        query = list_query(lists, {**texts, "search": search, "sort": sort})
        return await self._http.newest("/v1/jobs", "jobs", limit, query)

    async def job_groups(self, by: str = "project", filters: Mapping[str, str] | None = None) -> list[JobGroup]:
        """Count the jobs of each project, tag, name, state, kind, environment, model or owner, by state. `filters`:
        those of GET /v1/jobs."""
        return (await self._http.json(JobGroups, "GET", "/v1/jobs/groups", {"by": by, **(filters or {})}))["groups"]

    async def label(
        self,
        id: str,
        *,
        name: str | None = None,
        project: str | None = None,
        tags: Collection[str] | None = None,
        add_tags: Collection[str] | None = None,
        remove_tags: Collection[str] | None = None,
        notes: str | None = None,
    ) -> JobSummary:
        """Change what a job is called and what is noted about it, running or over; what is None stays. `tags` replaces
        all tags, `add_tags` and `remove_tags` change some. Raises ApiConflict for more than 20 tags."""
        lists = {"tags": tags, "add_tags": add_tags, "remove_tags": remove_tags}
        texts = {"name": name, "project": project, "notes": notes}
        return await self._http.json(JobSummary, "PATCH", resource("jobs", id), noun=label_changes(lists, texts))

    async def job(self, id: str) -> Job:
        """Everything the server knows of a job: state, progress, spec, workers, last metrics. Raises ApiNotFound."""
        return await self._http.json(Job, "GET", resource("jobs", id))

    async def cancel(self, id: str) -> JobSummary:
        """End a job; its checkpoints stay. Raises ApiConflict if it has ended otherwise."""
        return await self._http.json(JobSummary, "POST", resource("jobs", id, "/cancel"))

    async def pause(self, id: str) -> JobSummary:
        """Save what a job has trained and free its workers."""
        return await self._http.json(JobSummary, "POST", resource("jobs", id, "/pause"))

    async def resume(self, id: str) -> JobSummary:
        """Queue a paused job again; it continues from its newest checkpoint."""
        return await self._http.json(JobSummary, "POST", resource("jobs", id, "/resume"))

    async def failures(self, id: str, limit: int = 100) -> Failures:
        """`failures`: the newest groups that failed for good, newest first; `counts`: of all of them, by reason."""
        return await self._http.json(Failures, "GET", resource("jobs", id, "/failures"), {"limit": str(limit)})

    async def wait(
        self,
        id: str,
        timeout_s: float | None = None,
        *,
        cancel_on_interrupt: bool = False,
        on_change: OnChange | None = None,
    ) -> Job:
        """Wait until a job has ended and return it. Raises TimeoutError; the job continues.

        The job continues after Ctrl-C, and when this task is cancelled, unless `cancel_on_interrupt`. `on_change(job)`
        is called whenever the job's state, or what it waits for, changes; default: a line on stderr, if that is a
        terminal.
        """
        told = on_change or print_change
        try:
            async with aclosing(self._changes(id, timeout_s)) as changes:
                async for job in changes:
                    told(job)
        except (asyncio.CancelledError, KeyboardInterrupt):
            if cancel_on_interrupt:
                await self.cancel(id)
            raise
        return job

    async def _changes(self, id: str, timeout_s: float | None) -> AsyncGenerator[Job, None]:
        """The job at each change of its state or of what it waits for, last in its final state. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        before = None
        while True:
            job = await self.job(id)
            if (now := (job["state"], job["waiting_for"])) != before:
                before = now
                yield job
            if JobState(job["state"]).final:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {id} is still {job['state']} after {timeout_s} s")
            await asyncio.sleep(POLL_S)

    async def event_log(self, id: str, after: str = "0") -> list[Event]:
        """Return the current events, oldest first."""
        asked = {"format": "json", "after": after}
        return (await self._http.json(Events, "GET", resource("jobs", id, "/events"), asked))["events"]

    async def events(self, id: str, after: str = "0") -> AsyncGenerator[Event, None]:
        """Yield events as they happen, until the job's final state. Reconnects and continues where it was."""
        query = {"after": after}

        async def is_over(news: bool) -> bool:
            return not news and JobState((await self.job(id))["state"]).final

        news = self._http.follow(
            resource("jobs", id, "/events"), query, lambda event: _place(event["id"]) > _place(query["after"]), is_over
        )
        async with aclosing(news):
            async for event in news:
                query["after"] = event["id"]
                yield event
                if event.get("state") in FINAL:
                    return

    async def metrics(
        self, id: str, after: int = 0, *, source: str | None = None, names: list[str] | None = None
    ) -> list[MetricPoint]:
        """History above the cursor `after`: every point with `cursor`, `source`, `step`, `time` and `values`, of which
        `names` selects some by their exact names."""
        path = resource("jobs", id, "/metrics")
        every: dict[str, str | list[str]] = {"limit": str(PAGE), **({"source": source} if source else {})}
        if not names:
            return await self._http.pages(path, "metrics", after, every)
        several = [",".join(names)] if len(names) > 1 else []  # servers of earlier releases read the first alone
        points = await self._http.pages(path, "metrics", after, {**every, "names": [*several, *names]})
        found = {name for point in points for name in point["values"]}
        if any("," in name and name not in found for name in names) and (several or not points):  # they divide it
            points = await self._http.pages(path, "metrics", after, every)
        elif not several:  # also a list with commas in one text
            return points
        for point in points:
            point["values"] = {name: value for name, value in point["values"].items() if name in names}
        return [point for point in points if point["values"]]

    async def watch_metrics(
        self, id: str, after: int = 0, *, poll_s: float = POLL_S
    ) -> AsyncGenerator[MetricPoint, None]:
        """Points as they come, until the job has ended and all of them are out."""
        while True:
            over = JobState((await self.job(id))["state"]).final
            for point in await self.metrics(id, after):
                after = point["cursor"]
                yield point
            if over:
                return
            await asyncio.sleep(poll_s)

    async def transcripts(
        self, id: str, step: int | None = None, *, outcome: str = "", opponent: str = ""
    ) -> Transcripts:
        """Kept validation episodes of an evaluation (default: the newest): `step`, `transcripts`, and all `steps`.
        `id`: JOB~POLICY for a job with several policies. `outcome`: only those that were `solved`, `unsolved`, `won`,
        `drawn` or `lost`; `opponent`: only those against it."""
        query = {} if step is None else {"step": str(step)}
        query |= {name: value for name, value in (("outcome", outcome), ("opponent", opponent)) if value}
        return await self._http.json(Transcripts, "GET", path_of(id, "/transcripts"), query_of(id, **query))

    async def workers(self) -> list[Worker]:
        """The workers of the cluster and what they do. For operators."""
        return (await self._http.json(Workers, "GET", "/v1/workers"))["workers"]

    async def queues(self) -> list[Queue]:
        """The streams of NATS and how many messages wait in each. For operators."""
        return (await self._http.json(Queues, "GET", "/v1/queues"))["queues"]


def print_change(job: Job) -> None:
    """`job j-0123456789 is queued: waits for a free trainer`, on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        return
    sys.stderr.write(f"job {job['id']} is {state_of(job)}\n")
    sys.stderr.flush()


def _place(event: str) -> tuple[int, ...]:
    """Return an event's position in its log, from its id: MILLISECONDS-COUNT."""
    return tuple(map(int, event.split("-")))
