"""Waits for a ready rollout worker on behalf of inference requests. Redis is queried once for all requests that wait
for the same job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from opentinker.shared.openai.fields import InvalidField
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord, WorkerInfo
from opentinker.shared.types.errors import NotFound

LOOK_S = 0.2
"""How old what was seen may be."""


class ReadyWorkers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._looks: dict[str, asyncio.Task[tuple[JobRecord, list[WorkerInfo]]]] = {}
        """By job; each for LOOK_S after it has ended."""
        self._waiting: Counter[str] = Counter()

    async def look(self, job: str) -> tuple[JobRecord, list[WorkerInfo]]:
        """The job, and those of its rollout workers that are ready. Raises Refused."""
        seen = self._looks.get(job)
        if seen is None:
            seen = self._looks[job] = asyncio.get_running_loop().create_task(self._look(job))
            seen.add_done_callback(lambda task: self._forget(job, task))
        try:
            return await asyncio.shield(seen)
        except NotFound:
            raise InvalidField(f"job {job} is gone", status=404) from None

    async def _look(self, job: str) -> tuple[JobRecord, list[WorkerInfo]]:
        record = await self._store.job(job)
        return record, [worker for worker in await self._store.workers() if worker.ready_for(job)]

    def _forget(self, job: str, task: asyncio.Task[tuple[JobRecord, list[WorkerInfo]]]) -> None:
        if not task.cancelled():
            task.exception()  # who asked may be gone
        asyncio.get_running_loop().call_later(LOOK_S, self._looks.pop, job, None)

    @contextmanager
    def place(self, job: JobRecord) -> Iterator[None]:
        """A place among those who wait until a worker of the job is ready: as many as its workers would take then.

        Raises Refused.
        """
        serving, workers = job.spec["serving"], job.spec["resources"]["rollout_workers"]
        room = (serving["max_concurrent"] + serving["max_waiting"]) * workers
        if self._waiting[job.id] >= room:
            raise InvalidField(
                f"{room} requests wait for a rollout worker of job {job.id} (serving.max_concurrent, "
                "serving.max_waiting): try again in a moment",
                status=429,
                code="overloaded",
            )
        self._waiting[job.id] += 1
        try:
            yield
        finally:
            self._waiting[job.id] -= 1
            if not self._waiting[job.id]:
                del self._waiting[job.id]
