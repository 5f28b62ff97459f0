"""Routes requests of inference jobs: selects the rollout worker, replaces one that dies, and cancels requests without a
client. A request to a sleeping job wakes it.

The least busy worker is chosen, as far as this scheduler knows; among those about equally busy, always the same one for
the same model and beginning of a conversation, whose tokens are in its cache. A worker that refuses because it is full,
or is lost before it has sent anything, is replaced by another; if a job's workers are being replaced, the request
waits. A lost worker is asked again if no other is ready: only the connection may have been lost.

wanted   answers WANTED: which requests of ours somebody still waits for
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

import msgspec
import structlog

from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.bus import NoReply, NoResponders, TooLarge
from opentinker.shared.messaging.streaming import ask as ask_in_pieces
from opentinker.shared.messaging.subjects import ABANDON, GENERATE, WAKE, WANTED
from opentinker.shared.openai.fields import InvalidField
from opentinker.shared.openai.inference import (
    SILENCE_S,
    CancelGenerate,
    GenerateChunk,
    GenerateError,
    GenerateRequest,
    InFlight,
)
from opentinker.shared.runtime.service import Context
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.state.store import Store
from opentinker.shared.types import codec
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.workers import WorkerInfo

log = structlog.get_logger()

POLL_S = 0.2
"""Age at which the ready workers of a job are looked up again."""
WORKER_TIMEOUT_S = 30.0
"""Time for which a request waits for a rollout worker of a running job."""
MAX_TRIES = 5
UNREACHABLE_RETRY_S = 0.5
"""Interval between requests to a worker that NATS does not know at the moment."""
LOST = "the rollout worker that was answering is gone; ask again"
NEAR = 2
"""Requests more than the least busy one has: as good, if it knows the beginning."""
BEGINNING = 512
"""Characters or tokens of a plain prompt that may be shared with others."""


class RoutingAttempts:
    """Attempts of one request: workers asked, and the outcomes."""

    def __init__(self, timeout_s: float = WORKER_TIMEOUT_S) -> None:
        self.last: GenerateError | None = None
        self.left = MAX_TRIES
        self._timeout_s = timeout_s
        self.until = time.monotonic() + timeout_s
        self._refused: set[str] = set()
        self._lost: dict[str, float] = {}
        """From when on it may be asked again, by address."""

    def refused(self, worker: WorkerInfo, refusal: GenerateError) -> None:
        self.last = refusal
        self._refused.add(worker.address)
        self._count()

    def lost(self, worker: WorkerInfo, *, heard: bool) -> bool:
        """Record a worker that fell silent or whose messages did not arrive: its connection may come back. True for the
        first time.

        `heard`: it may have got the request; else nothing was done, and that costs no try.
        """
        first = worker.address not in self._lost
        self.last = GenerateError(message=LOST, status=503, elsewhere=True)
        self._lost[worker.address] = time.monotonic() + (0.0 if heard else UNREACHABLE_RETRY_S)
        if heard:
            self._count()
        return first

    def _count(self) -> None:
        self.left -= 1
        self.until = time.monotonic() + self._timeout_s

    def best(self, ready: list[WorkerInfo], of: Callable[[list[WorkerInfo]], WorkerInfo]) -> WorkerInfo | None:
        """Return the worker that `of` chooses; one that was lost before only if there is no other."""
        others = [worker for worker in ready if worker.address not in self._refused | self._lost.keys()]
        now = time.monotonic()
        back = {address for address, since in self._lost.items() if since <= now}
        again = [worker for worker in ready if worker.address in back - self._refused]
        return of(others or again) if others or again else None

    def hopes(self, ready: list[WorkerInfo]) -> bool:
        """One of them may be asked again later."""
        return any(worker.address not in self._refused for worker in ready)


class ReadyWorkers:
    """Finds the ready rollout workers of a job. All requests that wait for the same job share one query of Redis."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lookups = SingleFlight[tuple[JobRecord, list[WorkerInfo]]](POLL_S)
        self._waiting: Counter[str] = Counter()

    async def find(self, job: str) -> tuple[JobRecord, list[WorkerInfo]]:
        """Return the job, and those of its rollout workers that are ready. Raises InvalidField."""
        try:
            return await self._lookups.get(job, lambda: self._find(job))
        except NotFound:
            raise InvalidField(f"job {job} is gone", status=404) from None

    async def _find(self, job: str) -> tuple[JobRecord, list[WorkerInfo]]:
        record = await self._store.job(job)
        return record, [worker for worker in await self._store.workers() if worker.ready_for(job)]

    @contextmanager
    def place(self, job: JobRecord) -> Iterator[None]:
        """A place among those who wait until a worker of the job is ready: as many as its workers would take then.

        Raises InvalidField.
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


class InferenceRouter:
    def __init__(self, ctx: Context, *, silence_s: float = SILENCE_S) -> None:
        self.ctx, self._silence_s = ctx, silence_s
        self.name = f"{ctx.worker}-{uuid.uuid4().hex[:12]}"
        self._wanted: set[str] = set()
        self._busy: Counter[str] = Counter()
        """Requests of ours under way, by the worker's address."""
        self._waking: set[str] = set()
        self._workers = ReadyWorkers(ctx.store)

    async def run(self) -> None:
        """Serves WANTED until it is cancelled."""
        subscription = await self.ctx.bus.serve(WANTED, self._still, asker=self.name)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()

    async def _still(self, asked: InFlight) -> InFlight:
        return InFlight([id for id in asked.ids if id in self._wanted])

    async def answer(self, job: JobRecord, ask: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yield chunks, the reply last. Closing the generator cancels the request. Raises InvalidField."""
        tries, begun = RoutingAttempts(job.spec["serving"].get("wake_s") or WORKER_TIMEOUT_S), False
        while True:
            replica = await self._choose(job, ask, tries)
            asked = msgspec.structs.replace(ask, id=f"{ask.id}-{uuid.uuid4().hex[:6]}")  # a lost one may answer yet
            try:
                async with aclosing(self._ask(replica.address, asked)) as pieces:
                    async for piece in pieces:
                        if (refusal := piece.refusal) is not None:
                            tries.refused(replica, refusal)
                            log.info("request_refused", job=job.id, replica=replica.id, why=refusal.message)
                        elif piece.text or piece.reply is not None:
                            begun = True
                            yield piece
                            if piece.reply is not None:
                                return
            except (NoReply, codec.WireError) as error:
                if tries.lost(replica, heard=not isinstance(error, NoResponders)):
                    log.warning("replica_lost", job=job.id, replica=replica.id, error=str(error))
            assert tries.last is not None
            if begun or not tries.last.elsewhere or not tries.left:
                raise _refused(tries.last)

    async def _ask(self, address: str, ask: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the pieces of an answer, up to the reply or the refusal, which may be ours. Raises NoReply or WireError
        for a worker that is lost."""
        self._wanted.add(ask.id)
        self._busy[address] += 1
        seq, over = 0, False
        try:
            async with aclosing(
                ask_in_pieces(self.ctx.bus, GENERATE, ask, silence_s=self._silence_s, worker=address)
            ) as pieces:
                async for piece in pieces:
                    if piece.seq != seq:
                        raise NoReply(f"piece {seq} of an answer was lost on the way")
                    seq += 1
                    over = piece.reply is not None or piece.refusal is not None
                    yield piece
                    if over:
                        return
        except TooLarge as error:
            over = True
            size = f"the request has {error.size} bytes, and the NATS server takes {error.limit} (max_payload)"
            yield GenerateChunk(seq=seq, refusal=GenerateError(message=size, status=413))
        finally:
            self._wanted.discard(ask.id)
            self._busy[address] -= 1
            if not self._busy[address]:
                del self._busy[address]
            if not over:
                await self.ctx.bus.emit(ABANDON, CancelGenerate(ask.id), worker=address)

    async def _choose(self, job: JobRecord, ask: GenerateRequest, tries: RoutingAttempts) -> WorkerInfo:
        """Choose a worker. Raises the refusal of the last one asked if there is no other."""
        job, ready = await self._workers.find(job.id)
        if chosen := tries.best(ready, lambda workers: self._best(workers, ask)):
            return chosen
        with self._workers.place(job):
            while True:
                if ready and tries.last is not None and tries.last.status == 429 and not tries.hopes(ready):
                    raise _refused(tries.last)
                refuse_unless_served(job)
                if job.asleep:
                    await self._wake(job.id)
                if time.monotonic() >= tries.until:
                    if tries.last is not None:
                        raise _refused(tries.last)
                    why = f": it waits for {job.waiting_for}" if job.waiting_for else ""
                    raise InvalidField(f"no rollout worker of job {job.id} is ready now{why}; try again", status=503)
                await sleep(POLL_S)
                job, ready = await self._workers.find(job.id)
                if chosen := tries.best(ready, lambda workers: self._best(workers, ask)):
                    return chosen

    async def _wake(self, job: str) -> None:
        """Put a sleeping job back into the queue."""
        if job not in self._waking:
            self._waking.add(job)
            try:
                if (await self.ctx.store.job(job)).asleep:
                    await self.ctx.store.update(
                        job, only_active=True, event="woken", asleep=False, since=time.time(), waiting_for=""
                    )
                    await self.ctx.bus.emit(WAKE, {"job": job}, who="scheduler")
            except Conflict:  # it is over: the next lookup says so
                log.info("job_wakeup_failed", job=job)
            finally:
                self._waking.discard(job)

    def _requests(self, worker: WorkerInfo) -> int:
        """Under way: ours, as of now, or all that it told of with its last heartbeat, those of other schedulers too."""
        return max(self._busy[worker.address], int(worker.detail.get("requests", 0)))

    def _best(self, workers: list[WorkerInfo], ask: GenerateRequest) -> WorkerInfo:
        busy = {worker.address: self._requests(worker) for worker in workers}
        near = [worker for worker in workers if busy[worker.address] <= min(busy.values()) + NEAR]
        key = codec.encode(
            [ask.model, ask.tools, ask.messages[:2], (ask.text or "")[:BEGINNING], (ask.token_ids or [])[:BEGINNING]]
        )
        return max(near, key=lambda worker: hashlib.blake2b(key + worker.address.encode()).digest())


def refuse_unless_served(job: JobRecord) -> None:
    """Raises InvalidField for a job that answers no requests, now or ever."""
    if job.kind != "inference":
        raise InvalidField(
            f"job {job.id} is of kind {job.kind}, and only jobs of kind inference answer requests: submit one with "
            f"start.from = '{job.id}@latest' to serve its newest checkpoint"
        )
    if job.state.final:
        reason = f" ({job.reason})" if job.reason else ""
        raise InvalidField(f"job {job.id} has {job.state}{reason}: it answers no more requests", status=409)
    if job.state == JobState.PAUSED:
        raise InvalidField(f"job {job.id} is paused: opentinker resume {job.id}", status=503)
    if job.state == JobState.QUEUED and not job.epoch:
        why = f" for {job.waiting_for}" if job.waiting_for else ""
        raise InvalidField(f"job {job.id} is queued: it waits{why}; try again", status=503)


def _refused(refusal: GenerateError) -> InvalidField:
    return InvalidField(refusal.message, status=refusal.status, param=refusal.param, code=refusal.code)
