"""Reference-forward: frozen-policy logprobs on the way from rollout worker to trainer.

score   consumes SCORE of all jobs (a work queue shared by all instances), produces GROUP; waits for messages,
        woken by the pull; a message is acknowledged after its scored group is stored, so a dead instance's work
        is delivered to another
beat    produces heartbeats
report  produces METRIC once a second, by job

What is wrong with a job fails that job; a job for whose groups there is no room gets its messages later. Others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from opentinker.shared.bus import ACK_WAIT_S, Delivery, StreamFull, TooLarge
from opentinker.shared.errors import Conflict, JobFailed, NotFound, SpecError
from opentinker.shared.service import Context, first_failure
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.subjects import GROUP, SCORE, Subject
from opentinker.shared.telemetry import Meters, Reporter
from opentinker.shared.types import Group, JobState, Pool, WorkerInfo
from opentinker.shared.waiting import rest

if TYPE_CHECKING:
    from opentinker.services.reference_forward.scorer import Scorer

UNREAD = Subject(GROUP.pattern, msgspec.Raw)
"""GROUP for bytes that are none."""
FULL_PAUSE_S = 2.0
"""A job for whose group the stream had no room is left alone for so long."""


class ReferenceForward:
    """`make_scorer` is called in a thread when the first group comes: it imports torch, which few jobs need.

    `ack_wait_s`: silence after which the message of a dead instance is given to another.
    """

    def __init__(self, ctx: Context, make_scorer: Callable[[], Scorer], ack_wait_s: float = ACK_WAIT_S) -> None:
        self.ctx, self.ack_wait_s = ctx, ack_wait_s
        self._make_scorer = make_scorer
        self._scorer: Scorer | None = None
        self._full_until: dict[str, float] = {}
        """Jobs for whose last group the stream had no room."""
        self.log = structlog.get_logger()
        self.groups = 0
        self.tokens = 0
        self.meters = Meters()
        self.info = WorkerInfo(
            id=ctx.worker,
            incarnation=uuid.uuid4().hex[:12],
            pool=Pool.REFERENCE,
            host=socket.gethostname(),
            pid=os.getpid(),
            status="ready",
        )

    async def serve(self) -> None:
        try:
            report = Reporter(self.ctx.bus, self.info.id, self.meters).run()
            await first_failure({"score": self._score_loop(), "beat": self._beat_loop(), "report": report})
        finally:
            await self.ctx.store.leave(self.info)

    async def _beat_loop(self) -> None:
        while True:
            models_bytes = 0 if self._scorer is None else self._scorer.used_bytes
            detail = {"groups": self.groups, "tokens": self.tokens, "models_bytes": models_bytes}
            await self.ctx.store.beat(msgspec.structs.replace(self.info, detail=detail), self.ctx.settings.worker_ttl_s)
            await rest(self.ctx.settings.heartbeat_s)

    async def _score_loop(self) -> None:
        """Returns when the service is told to stop; the message at hand is finished first."""
        consumer = await self.ctx.bus.consume(SCORE, "reference-forward", batch=2, ack_wait_s=self.ack_wait_s, job="*")
        self.ctx.ready()
        try:
            while not self.ctx.stopping.is_set():
                delivery = await consumer.next(0.5, limit=2)
                if delivery is not None:
                    async with _kept_ours(delivery, self.ack_wait_s):
                        await self._handle(delivery)
        finally:
            await consumer.close()

    async def _handle(self, delivery: Delivery[Group]) -> None:
        group = delivery.noun
        if group is None:
            await self._pass_unread(delivery)
            return
        if time.monotonic() < self._full_until.get(group.job, 0.0):
            await delivery.nak(FULL_PAUSE_S)
            return
        try:
            await self._pass_on(group)
        except StreamFull as error:
            if group.job not in self._full_until:  # said once, until one of its groups is stored
                self.log.warning("stream_full", job=group.job, error=str(error))
            self._full_until[group.job] = time.monotonic() + FULL_PAUSE_S
            await delivery.nak(FULL_PAUSE_S)
            return
        except JobFailed as error:
            await self._fail(group.job, str(error))
        except SpecError as error:  # stored by another release
            await self._fail(group.job, f"its stored spec is not valid here: {error}")
        except TooLarge as error:
            await self._fail(
                group.job,
                f"group {group.seq} with reference logprobs does not fit into one message ({error}): lower "
                f"algorithm.group_size ({len(group.trajectories)}) or rollout.context_length, or raise max_payload",
            )
        await delivery.ack_sync()

    async def _pass_unread(self, delivery: Delivery[Group]) -> None:
        """The trainer discards and replaces what cannot be decoded: it knows the group by the message's id."""
        job = delivery.key.partition("/")[0]  # JOB/NUMBER:ATTEMPT
        self.log.error("undecodable_group_passed_on", group=delivery.key, error=delivery.error)
        try:
            if job and not (await self.ctx.store.job(job)).state.final:
                await self.ctx.bus.publish(UNREAD, msgspec.Raw(delivery.data), delivery.key, job=job)
        except NotFound:
            pass  # nobody waits for it
        except StreamFull:
            await delivery.nak(FULL_PAUSE_S)
            return
        await delivery.ack_sync()

    async def _pass_on(self, group: Group) -> None:
        """Raises what is wrong with the group's job, and StreamFull."""
        spec = await self._spec(group.job)
        if spec is None:
            self.log.info("group_of_ended_job_dropped", job=group.job, group=group.seq)
            return
        await self._publish(await self._score(spec, group))
        self._full_until.pop(group.job, None)
        tokens = sum(len(t.mask_T) for t in group.trajectories)
        self.groups += 1
        self.tokens += tokens
        counts = self.meters.of(group.job).counts
        counts["reference/groups"] += 1
        counts["reference/tokens"] += tokens

    async def _score(self, spec: JobSpec, group: Group) -> Group:
        """Raises JobFailed. An invalid group as it is: the trainer's own check discards it, so the ledger balances."""
        try:
            group.check()
        except ValueError as error:
            self.log.error("invalid_group_passed_on", job=group.job, group=group.seq, error=str(error))
            return group
        if self._scorer is None:
            self._scorer = await asyncio.to_thread(self._make_scorer)
        try:
            return await asyncio.to_thread(self._scorer.score, spec.model, spec.rollout.temperature, group)
        except (ValueError, IndexError, RuntimeError, MemoryError, OSError) as error:
            raise JobFailed(
                f"model {spec.model.base!r} could not score group {group.seq}: {type(error).__name__}: {error}"
            ) from error

    async def _spec(self, job: str) -> JobSpec | None:
        """None when the job is gone or over: nobody waits for its groups any more."""
        try:
            record = await self.ctx.store.job(job)
        except NotFound:
            return None
        return None if record.state.final else parse_spec(record.spec)

    async def _publish(self, group: Group) -> None:
        """Stored durably when this returns; a redelivered group is published under the same id, so kept once."""
        attempt = group.trajectories[0].attempt if group.trajectories else ""
        await self.ctx.bus.publish(GROUP, group, f"{group.key}:{attempt}", job=group.job)

    async def _fail(self, job: str, reason: str) -> None:
        self.log.error("reference_unusable", job=job, error=reason)
        with contextlib.suppress(Conflict, NotFound):  # it ended meanwhile
            await self.ctx.store.transition(job, JobState.FAILED, reason=f"reference-forward: {reason}")


@contextlib.asynccontextmanager
async def _kept_ours(delivery: Delivery[Group], ack_wait_s: float) -> AsyncIterator[None]:
    """While we work on it (a model may have to be loaded first), nobody else is given the message."""

    async def remind() -> None:
        while True:
            await asyncio.sleep(ack_wait_s / 3)
            await delivery.in_progress()

    reminder = asyncio.create_task(remind())
    try:
        yield
    finally:
        reminder.cancel()
        await asyncio.gather(reminder, return_exceptions=True)


async def serve(ctx: Context) -> None:
    def make_scorer() -> Scorer:
        from opentinker.services.reference_forward.scorer import Scorer

        return Scorer(int(ctx.settings.reference_memory_gb * 1e9))

    await ReferenceForward(ctx, make_scorer).serve()
