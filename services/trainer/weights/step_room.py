"""Engines that must sleep while the trainer takes a step, because both have no room on its GPU.

An engine's replies, also refusals, say whether it sleeps (`SwapReply.sleeps`), from the first ping on. It is remembered
until its process is gone, whether or not it is in the weight group: its memory stays occupied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from opentinker.services.trainer.weights.swap_requests import PING_S, SwapCalls, SwapFailure
from opentinker.shared.time_limit import Stopwatch
from opentinker.shared.types.swap import SwapReply
from opentinker.shared.types.workers import WorkerInfo

Failures = list[tuple[WorkerInfo, SwapFailure]]


class StepRoom:
    def __init__(self, calls: SwapCalls) -> None:
        self._calls = calls
        self._sleepers: dict[str, WorkerInfo] = {}
        """By address."""
        self.had_sleepers = False
        """One of them may be starting again, and measure then what a step leaves."""
        self._asleep = Stopwatch()

    @property
    def sleepers(self) -> list[WorkerInfo]:
        return list(self._sleepers.values())

    @property
    def asleep_s(self) -> float:
        """Seconds in which engines slept."""
        return self._asleep.seconds

    def note(self, workers: Sequence[WorkerInfo], answers: Sequence[SwapReply | SwapFailure]) -> None:
        """Remember from their answers which of the workers have engines that sleep."""
        for worker, answer in zip(workers, answers, strict=True):
            if answer.sleeps:
                self._sleepers[worker.address] = worker
                self.had_sleepers = True

    def forget_others(self, addresses: Collection[str]) -> None:
        """Forget engines at other addresses than these, which have heartbeats."""
        self._sleepers = {name: worker for name, worker in self._sleepers.items() if name in addresses}

    async def tell(
        self,
        sleepers: Sequence[WorkerInfo],
        action: str,
        generation: int,
        timeout_s: float,
        excluded: Collection[str] = (),
    ) -> Failures:
        """Have them sleep or wake. Return those that did not, without those whose process is gone. Those that are
        busy, or at the addresses that are `excluded`, have the time of a ping: no step waits for them again."""

        async def ask(worker: WorkerInfo) -> SwapReply | SwapFailure:
            (ping,) = await self._calls.ping_all([worker])
            refuses = isinstance(ping, SwapFailure) and not ping.absent
            limit = PING_S if refuses or worker.address in excluded else timeout_s
            (answer,) = await self._calls.tell([worker], action, generation, limit)
            return answer

        if action == "sleep":
            self._asleep.start()
        answers = await asyncio.gather(*map(ask, sleepers))
        if action == "wake":
            self._asleep.stop()
        failures = []
        for worker, answer in zip(sleepers, answers, strict=True):
            if not isinstance(answer, SwapFailure):
                continue
            if answer.gone:
                self._sleepers.pop(worker.address, None)
            else:
                failures.append((worker, answer))
        return failures


def release_unused(device: str) -> None:
    """Give memory that torch keeps for later tensors back to the GPU."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
