"""Sends SWAP requests to rollout workers and detects workers that will not answer. `publisher.py` runs the swap.

Requests go to all members of the weight group concurrently, while the trainer does its own part (forming the group,
sending). Workers without an answer are pinged: a killed process is detected immediately, because its address has no
responder; a hanging or unreachable one when its heartbeat expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.bus import NoReply, NoResponders
from opentinker.shared.messaging.subjects import SWAP
from opentinker.shared.runtime.liveness import HeartbeatWatch
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Lease
from opentinker.shared.types.swap import SwapCommand, SwapReply
from opentinker.shared.types.workers import WorkerInfo

T = TypeVar("T")

PING_S = 1.0
"""Time limit of a ping; a worker that does not answer within it does not become a member."""
POLL_S = 0.25
"""Interval between pings of workers without an answer."""
REQUEST_LIMIT_S = 86_400.0
"""Effectively no limit: `SwapCalls.call` limits the wait, but the bus requires a timeout."""


@dataclass(frozen=True)
class SwapFailure:
    """The reason why a worker did not execute a command."""

    why: str
    absent: bool = False
    """No answer: the process does not exist, its heartbeat has expired, or NATS is unreachable."""
    late: bool = False
    """The worker is alive but did not answer in time."""
    gone: bool = False
    """The NATS server has no responder at its address."""
    sleeps: bool = False
    """As in its answer."""
    at: float = field(default_factory=time.monotonic)

    @property
    def silent(self) -> bool:
        return self.absent or self.late


class SwapCalls:
    def __init__(self, ctx: Context, lease: Lease, policy: str = "") -> None:
        self.ctx = ctx
        self.command = partial(SwapCommand, job=lease.job, policy=policy, epoch=lease.epoch)
        """A command to the workers of the policy."""
        self._beating: set[str] = set()
        self._watch = HeartbeatWatch()
        self._polled_at = 0.0
        self._poll_lock = asyncio.Lock()

    async def ping_all(self, workers: Sequence[WorkerInfo]) -> list[SwapReply | SwapFailure]:
        """Ping workers, regardless of their last heartbeat; one that is busy with an earlier swap fails."""
        return list(await asyncio.gather(*(self._ping(worker) for worker in workers)))

    async def tell(
        self, workers: Sequence[WorkerInfo], action: str, generation: int, timeout_s: float
    ) -> list[SwapReply | SwapFailure]:
        """Send one command to all of them and wait for their answers, at most `timeout_s`."""
        if not workers:
            return []
        command = self.command(action=action, generation=generation)
        asks = [asyncio.create_task(self._request(worker, command)) for worker in workers]
        try:
            await asyncio.wait(asks, timeout=timeout_s)
        finally:
            await cancel_and_wait(*asks)
        late = SwapFailure(f"no answer to {action!r} within {timeout_s:.1f} s", late=True)
        return [late if ask.cancelled() else ask.result() for ask in asks]

    async def call(
        self,
        commands: Sequence[tuple[WorkerInfo, SwapCommand]],
        part: Awaitable[T],
        timeout_s: float,
        failed: Callable[[str], None],
    ) -> tuple[T, list[SwapReply | SwapFailure]]:
        """Send all commands concurrently and run the trainer's `part`, which must end by itself. Then answers may take
        another `timeout_s`. `failed(why)` is called for each failure as soon as it is known."""
        asks = [asyncio.create_task(self._call(worker, command, failed)) for worker, command in commands]
        try:
            result = await part
            await asyncio.wait(asks, timeout=timeout_s)
        finally:
            await cancel_and_wait(*asks)
        late = SwapFailure(f"no answer {timeout_s:.1f} s after the trainer finished its part", late=True)
        return result, [late if ask.cancelled() else ask.result() for ask in asks]

    async def _call(
        self, worker: WorkerInfo, command: SwapCommand, failed: Callable[[str], None]
    ) -> SwapReply | SwapFailure:
        answer = await self._request(worker, command)
        if isinstance(answer, SwapFailure):
            failed(f"{worker.id}: {answer.why}")
        return answer

    async def _request(self, worker: WorkerInfo, command: SwapCommand) -> SwapReply | SwapFailure:
        asking = asyncio.create_task(self.ctx.bus.request(SWAP, command, REQUEST_LIMIT_S, worker=worker.address))
        try:
            while not (await asyncio.wait([asking], timeout=POLL_S))[0]:
                if failure := await self._absence(worker):
                    return failure
            reply = asking.result()
        except NoReply as error:  # the address has no responder, or NATS is away
            return SwapFailure(str(error), absent=True, gone=isinstance(error, NoResponders))
        except WireError as error:
            return SwapFailure(str(error))
        finally:
            await cancel_and_wait(asking)
        return reply if reply.ok else SwapFailure(reply.error, sleeps=reply.sleeps)

    async def _absence(self, worker: WorkerInfo) -> SwapFailure | None:
        """Return why the worker will not answer; None if it may."""
        answer = await self._ping(worker)
        if isinstance(answer, SwapFailure) and answer.gone:
            return SwapFailure("its process is gone", absent=True, gone=True)
        if worker.address not in await self._heartbeats():
            return SwapFailure("its heartbeat has expired", absent=True)
        return None

    async def _heartbeats(self) -> set[str]:
        """Return the addresses of all live workers, at most POLL_S old."""
        async with self._poll_lock:
            if time.monotonic() - self._polled_at > POLL_S:
                beats = await self.ctx.store.beats()
                silent = {beat.id for beat in self._watch.silent(beats)}  # independent of any scheduler
                self._beating = {beat.address for beat in beats if beat.id not in silent}
                self._polled_at = time.monotonic()
            return self._beating

    async def _ping(self, worker: WorkerInfo) -> SwapReply | SwapFailure:
        command = self.command(action="ping", generation=0)
        try:
            reply = await self.ctx.bus.request(SWAP, command, PING_S, worker=worker.address)
        except NoReply as error:
            return SwapFailure(str(error), absent=True, gone=isinstance(error, NoResponders))
        except WireError as error:
            return SwapFailure(str(error))
        return reply if reply.ok else SwapFailure(reply.error, sleeps=reply.sleeps)


def at_fault(
    members: Sequence[WorkerInfo], answers: Sequence[SwapReply | SwapFailure], problem: str
) -> list[tuple[WorkerInfo, SwapFailure]]:
    """Return the dead and silent workers. If there are none: all that failed, or, where the trainer's own part failed
    too, the first of them, as the others may have failed because of it."""
    failed = [(w, answer) for w, answer in zip(members, answers, strict=True) if isinstance(answer, SwapFailure)]
    silent = [(w, failure) for w, failure in failed if failure.silent]
    if silent or not problem:
        return silent or failed
    return sorted(failed, key=lambda one: one[1].at)[:1]


def slowest(replies: Sequence[SwapReply]) -> dict[str, float]:
    """Return the longest time of each phase of a swap, in seconds."""
    phases: dict[str, float] = {}
    for reply in replies:
        for name, value in reply.seconds.items():
            phases[name] = max(phases.get(name, 0.0), value)
    return phases
