"""Requests of inference jobs: which rollout worker answers, what if it dies, and when nobody waits any more.

The least busy one is asked, as far as this scheduler knows; among those about as busy, always the same one for the same
beginning of a conversation, whose tokens it has in its cache. One that refuses because it is full, or that is lost
before it has said anything, is replaced by another, and a job whose workers are being replaced is waited for.

wanted   answers WANTED: which requests of ours somebody still waits for
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from opentinker.shared import codec
from opentinker.shared.bus import NoReply, TooLarge
from opentinker.shared.errors import NotFound
from opentinker.shared.inference import SILENCE_S, Abandoned, Ask, Piece, Refusal, Underway
from opentinker.shared.openai.fields import Refused
from opentinker.shared.service import Context
from opentinker.shared.streaming import ask as ask_in_pieces
from opentinker.shared.subjects import ABANDON, GENERATE, WANTED
from opentinker.shared.types import JobRecord, JobState, Pool, WorkerInfo
from opentinker.shared.waiting import rest

log = structlog.get_logger()

PATIENCE_S = 30.0
"""A running job without a ready rollout worker is waited for so long."""
LOOK_S = 0.2
MOST_TRIES = 5
NEAR = 2
"""Requests more than the least busy one has: as good, if it knows the beginning."""
BEGINNING = 512
"""Characters or tokens of a plain prompt that may be shared with others."""


class Replicas:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.name = f"{ctx.worker}-{uuid.uuid4().hex[:12]}"
        self._wanted: set[str] = set()
        self._busy: Counter[str] = Counter()
        """Requests of ours under way, by the worker's address."""

    async def run(self) -> None:
        """Serves WANTED until it is cancelled."""
        subscription = await self.ctx.bus.serve(WANTED, self._still, asker=self.name)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()

    async def _still(self, asked: Underway) -> Underway:
        return Underway([id for id in asked.ids if id in self._wanted])

    async def answer(self, job: JobRecord, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Pieces with something in them, the reply last. Raises Refused. Closing the generator ends the request."""
        tried: set[str] = set()
        begun, refusal = False, None
        self._wanted.add(ask.id)
        try:
            for _ in range(MOST_TRIES):
                replica = await self._choose(job, ask, tried, refusal)
                tried.add(replica.address)
                refusal = None
                async with aclosing(self._ask(replica.address, ask)) as pieces:
                    async for piece in pieces:
                        refusal = piece.refusal
                        if refusal is None and (piece.text or piece.reply is not None):
                            begun = True
                            yield piece
                if refusal is None:
                    return
                if begun or not refusal.elsewhere:
                    break
                log.info("request_goes_elsewhere", job=job.id, replica=replica.id, why=refusal.message)
            assert refusal is not None
            raise _refused(refusal)
        finally:
            self._wanted.discard(ask.id)

    async def _ask(self, address: str, ask: Ask) -> AsyncGenerator[Piece, None]:
        """To the piece with the reply or the refusal, which may be ours: the worker is lost."""
        self._busy[address] += 1
        seq, over = 0, False
        try:
            async with aclosing(
                ask_in_pieces(self.ctx.bus, GENERATE, ask, silence_s=SILENCE_S, worker=address)
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
            yield Piece(seq=seq, refusal=Refusal(message=size, status=413))
        except (NoReply, codec.WireError) as error:
            log.warning("replica_lost", replica=address, error=str(error))
            lost = "the rollout worker that was answering is gone; ask again"
            yield Piece(seq=seq, refusal=Refusal(message=lost, status=503, elsewhere=True))
        finally:
            self._busy[address] -= 1
            if not self._busy[address]:
                del self._busy[address]
            if not over:
                await self.ctx.bus.emit(ABANDON, Abandoned(ask.id), worker=address)

    async def _choose(self, job: JobRecord, ask: Ask, tried: set[str], refusal: Refusal | None) -> WorkerInfo:
        """Raises Refused: with `refusal` when everybody has been tried who was there, or when nobody comes."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ready = [
                worker
                for worker in await self.ctx.store.workers()
                if worker.job == job.id and worker.pool == Pool.ROLLOUT and worker.status == "ready"
            ]
            if others := [worker for worker in ready if worker.address not in tried]:
                return self._best(others, ask)
            if ready and refusal is not None and refusal.status == 429:
                raise _refused(refusal)
            try:
                job = await self.ctx.store.job(job.id)
            except NotFound:
                raise Refused(f"job {job.id} is gone", status=404) from None
            refuse_unless_served(job)
            if time.monotonic() >= deadline:
                why = f": it waits for {job.waiting_for}" if job.waiting_for else ""
                raise Refused(f"no rollout worker of job {job.id} is ready now{why}; try again", status=503)
            await rest(LOOK_S)

    def _best(self, workers: list[WorkerInfo], ask: Ask) -> WorkerInfo:
        least = min(self._busy[worker.address] for worker in workers)
        near = [worker for worker in workers if self._busy[worker.address] <= least + NEAR]
        key = codec.encode(
            [ask.tools, ask.messages[:2], (ask.text or "")[:BEGINNING], (ask.token_ids or [])[:BEGINNING]]
        )
        return max(near, key=lambda worker: hashlib.blake2b(key + worker.address.encode()).digest())


def refuse_unless_served(job: JobRecord) -> None:
    """Raises Refused for a job that answers no requests, now or ever."""
    if job.kind != "inference":
        raise Refused(
            f"job {job.id} is of kind {job.kind}, and only jobs of kind inference answer requests: submit one with "
            f"start.from = '{job.id}@latest' to serve its newest checkpoint"
        )
    if job.state.final:
        reason = f" ({job.reason})" if job.reason else ""
        raise Refused(f"job {job.id} has {job.state}{reason}: it answers no more requests", status=409)
    if job.state == JobState.QUEUED:
        why = f" for {job.waiting_for}" if job.waiting_for else ""
        raise Refused(f"job {job.id} is queued: it waits{why}; try again", status=503)


def _refused(refusal: Refusal) -> Refused:
    return Refused(refusal.message, status=refusal.status, param=refusal.param, code=refusal.code)
