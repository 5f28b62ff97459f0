"""A rollout worker's end of SWAP: weights of one job, taken through its trainer's weight group.

swap handler   answers SWAP: join the weight group, receive a version, say hello
probe          has the engine compute, after a version that has one, what the trainer computed of a few tokens; how far
               the two differ goes with the answer to the next version, so that no swap waits for it
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from opentinker.services.rollout_worker.engines.base import Engine, EngineError, EngineLost, SwapError
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import Fenced, NotFound
from opentinker.shared.types.swap import Probe, SwapCommand, SwapReply
from opentinker.shared.types.workers import WorkerInfo

log = structlog.get_logger()

PHASES = ("transfer", "pause", "load", "resume")
"""Phases of a swap, in order."""
END_S = 5.0
"""A trainer that has died in the middle of a transfer is not waited for any longer."""


class WeightReceiver:
    """`job`: whose weights; `store` says which epoch owns it. `taken(seconds by phase)` is awaited with each version;
    `broken` gets the end of the engine."""

    def __init__(
        self,
        store: Store,
        info: WorkerInfo,
        job: str,
        epoch: int,
        engine: Engine,
        broken: asyncio.Future[None],
        taken: Callable[[dict[str, float]], Awaitable[None]],
    ) -> None:
        self.info, self.job, self.epoch, self.engine = info, job, epoch, engine
        self._store = store
        self._broken, self._taken = broken, taken
        self._swapping = asyncio.Lock()
        self._ending = False
        self._probing: asyncio.Task[None] | None = None
        self._mismatch: float | None = None

    async def end(self) -> None:
        """Refuses what comes from now on, and lets a swap that is under way end before the engine is closed."""
        self._ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S), self._swapping:
                pass
        await cancel_and_wait(self._probing)

    async def answer(self, command: SwapCommand) -> SwapReply:
        """Never raises: a failure leaves the old weights and version and is reported to the trainer."""
        if command.action == "ping":  # answered during a running swap
            busy = self._swapping.locked()
            return self._reply(ok=not busy, error="it is still busy with an earlier swap" if busy else "")
        async with self._swapping:
            if self._ending:
                return self._reply(ok=False, error=f"this worker leaves job {self.job}")
            if why := await self._refuses(command):
                log.warning("swap_refused", action=command.action, swap_epoch=command.epoch, why=why)
                return self._reply(ok=False, error=why)
            self.epoch = command.epoch
            mismatch = None
            try:
                seconds = await self._obey(command)
                if command.action == "receive":
                    mismatch, self._mismatch = self._mismatch, None
                    await self._probe(command)
            except EngineLost as error:
                if not self._broken.done():
                    self._broken.set_exception(error)
                return self._reply(ok=False, error=str(error))
            except (SwapError, EngineError) as error:
                if not self._ending:
                    log.warning("swap_failed", action=command.action, error=str(error))
                return self._reply(ok=False, error=str(error))
            return self._reply(ok=True, seconds=seconds, mismatch=mismatch)

    async def _obey(self, command: SwapCommand) -> dict[str, float]:
        if command.action == "sleep":
            await self.engine.sleep()
            return {}
        await self.engine.wake()  # also when the trainer that had sent it to sleep is gone
        if command.action == "wake":
            return {}
        if command.action == "join":
            await self.engine.join(command)
            return {}
        seconds = await self.engine.receive(command)
        await self._taken(seconds)
        return seconds

    async def _probe(self, command: SwapCommand) -> None:
        """Begins the version's; one that is still waiting for its turn in the engine is given up."""
        await cancel_and_wait(self._probing)
        if command.probe is not None and command.version is not None:
            self._probing = asyncio.create_task(self._compare(command.version, command.probe))

    async def _compare(self, version: WeightVersion, probe: Probe) -> None:
        try:
            scores = await self.engine.score(probe.ids)
        except EngineError as error:
            log.warning("probe_failed", version=str(version), error=str(error))
            return
        if scores is not None and scores.version == version:
            gaps = [abs(own - sent) for own, sent in zip(scores.logprobs, probe.logprobs, strict=True)]
            self._mismatch = sum(gaps) / len(gaps)

    async def _refuses(self, command: SwapCommand) -> str:
        """Return why a trainer is refused: this worker serves another job, or the job is leased to another trainer, of
        which this worker may not know yet."""
        if command.job != self.job or command.epoch < self.epoch:
            return f"this worker serves job {self.job} epoch {self.epoch}"
        try:
            await self._store.require_epoch(self.job, command.epoch)
        except (Fenced, NotFound) as error:
            return str(error)
        except (RedisError, OSError) as error:
            return f"Redis does not say whose job {self.job} is: {error}"
        return ""

    def _reply(
        self, *, ok: bool, error: str = "", seconds: dict[str, float] | None = None, mismatch: float | None = None
    ) -> SwapReply:
        return SwapReply(
            worker=self.info.id,
            incarnation=self.info.incarnation,
            ok=ok,
            error=error,
            version=self.engine.version,
            sleeps=self.engine.sleeps,
            seconds=seconds or {},
            mismatch=mismatch,
        )


def note_swap(lanes: Lanes, version: str, seconds: dict[str, float]) -> None:
    """Put the phases of a swap on the timeline: they followed each other, and have just ended."""
    at = time.time() - sum(seconds.get(phase, 0.0) for phase in PHASES)
    for phase in PHASES:
        length = seconds.get(phase, 0.0)
        if length > 0:
            lanes.note("swap", phase, at, at + length, version=version)
        at += length
    lanes.use(version)
