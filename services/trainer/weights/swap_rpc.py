"""What the publisher says to rollout workers over SWAP, and how it knows that one will not answer any more.

A question to all members of the weight group is asked at once, beside the trainer's own part (forming the group,
sending). Whoever still owes an answer is pinged: a killed process is known at once, because nobody serves its address
any more; one that hangs or is out of reach when its heartbeat has run out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.bus import NoReply, NoResponders
from opentinker.shared.messaging.subjects import SWAP
from opentinker.shared.runtime.liveness import Pulses
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Lease, SwapCommand, SwapReply, WorkerInfo

T = TypeVar("T")

PING_S = 1.0
"""A worker that is silent for so long does not become a member."""
LOOK_S = 0.25
"""How often those who owe an answer are looked after."""
NEVER_S = 86_400.0
"""Answers are waited for as `SwapCalls.ask` says; the bus asks for a limit too."""


@dataclass(frozen=True)
class Failure:
    """Why a worker did not do what it was asked."""

    why: str
    absent: bool = False
    """There is no such process, or its heart has stopped, or NATS is away: it said nothing."""
    late: bool = False
    """It lives and said nothing in time."""
    gone: bool = False
    """The NATS server knows of nobody at its address."""
    at: float = field(default_factory=time.monotonic)

    @property
    def silent(self) -> bool:
        return self.absent or self.late


class SwapCalls:
    def __init__(self, ctx: Context, lease: Lease) -> None:
        self.ctx, self.lease = ctx, lease
        self._beating: set[str] = set()
        self._pulses = Pulses()
        self._looked_at = 0.0
        self._looking = asyncio.Lock()

    async def greet(self, workers: Sequence[WorkerInfo]) -> list[SwapReply | Failure]:
        """Who is there, whatever the last heartbeat said; one that is busy with an earlier swap fails."""
        return list(await asyncio.gather(*(self._ping(worker) for worker in workers)))

    async def ask(
        self,
        commands: Sequence[tuple[WorkerInfo, SwapCommand]],
        part: Awaitable[T],
        patience_s: float,
        failed: Callable[[str], None],
    ) -> tuple[T, list[SwapReply | Failure]]:
        """Ask everyone at once and do the trainer's `part`, which must come to an end by itself. Then answers may take
        `patience_s` more. `failed(why)` is called for each failure, when it is known."""
        asks = [asyncio.create_task(self._ask(worker, command, failed)) for worker, command in commands]
        try:
            result = await part
            await asyncio.wait(asks, timeout=patience_s)
        finally:
            await cancel_and_wait(*asks)
        late = Failure(f"no answer {patience_s:.1f} s after the trainer had done its part", late=True)
        return result, [late if ask.cancelled() else ask.result() for ask in asks]

    async def _ask(
        self, worker: WorkerInfo, command: SwapCommand, failed: Callable[[str], None]
    ) -> SwapReply | Failure:
        answer = await self._answer(worker, command)
        if isinstance(answer, Failure):
            failed(f"{worker.id}: {answer.why}")
        return answer

    async def _answer(self, worker: WorkerInfo, command: SwapCommand) -> SwapReply | Failure:
        asking = asyncio.create_task(self.ctx.bus.request(SWAP, command, NEVER_S, worker=worker.address))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_S))[0]:
                if why := await self._absent(worker):
                    return Failure(why, absent=True)
            reply = asking.result()
        except NoReply as error:  # at once: nobody serves the address, or NATS is away
            return Failure(str(error), absent=True)
        except WireError as error:
            return Failure(str(error))
        finally:
            await cancel_and_wait(asking)
        return reply if reply.ok else Failure(reply.error)

    async def _absent(self, worker: WorkerInfo) -> str:
        """Why the worker will not answer any more, or nothing."""
        answer = await self._ping(worker)
        if isinstance(answer, Failure) and answer.gone:
            return "its process is gone"
        if worker.address not in await self._heartbeats():
            return "no heartbeat any more"
        return ""

    async def _heartbeats(self) -> set[str]:
        """Names of everyone who beats, at most LOOK_S old."""
        async with self._looking:
            if time.monotonic() - self._looked_at > LOOK_S:
                beats = await self.ctx.store.beats()
                silent = {beat.id for beat in self._pulses.silent(beats)}  # whether or not a scheduler is there
                self._beating = {beat.address for beat in beats if beat.id not in silent}
                self._looked_at = time.monotonic()
            return self._beating

    async def _ping(self, worker: WorkerInfo) -> SwapReply | Failure:
        command = SwapCommand(job=self.lease.job, epoch=self.lease.epoch, action="ping", generation=0)
        try:
            reply = await self.ctx.bus.request(SWAP, command, PING_S, worker=worker.address)
        except NoReply as error:
            return Failure(str(error), absent=True, gone=isinstance(error, NoResponders))
        except WireError as error:
            return Failure(str(error))
        return reply if reply.ok else Failure(reply.error)
