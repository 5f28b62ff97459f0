"""Commands in a bank's queue, and what they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter_bank import Rows
from opentinker.services.trainer.bank.limits import NotFinite
from opentinker.services.trainer.bank.mixed_batch import PieceResult
from opentinker.shared.types.core import F32


class ForwardResult(NamedTuple):
    loss: float
    """Sum over the command."""
    logprobs: list[F32]
    """[M] of each unit, M its learned tokens."""
    waited_s: float
    """Seconds in the queue and between its passes."""


@dataclass(kw_only=True)
class BankCommand:
    answer: asyncio.Future[Any]
    sent_at: float = field(default_factory=time.monotonic)
    passes_s: float = 0.0
    """Seconds of passes that it took part in."""

    @property
    def waited_s(self) -> float:
        """Seconds since it was sent without those."""
        return max(0.0, time.monotonic() - self.sent_at - self.passes_s)


@dataclass(kw_only=True)
class ForwardCommand(BankCommand):
    units: int
    make_rows: Callable[[int, int, bool], Rows]
    """From the first and after the last of its units, and whether they are its last."""
    backward: bool
    done: int = 0
    """Units."""
    loss_sum: float = 0.0
    logprobs: list[F32] = field(default_factory=list)

    def take(self, result: PieceResult) -> ForwardResult | NotFinite | None:
        """Add the result of its units in a pass, and return the answer if there is one now."""
        self.loss_sum += result.loss
        self.logprobs += result.logprobs
        if not result.is_finite:
            return NotFinite(
                f"loss {result.loss}: the loss or its gradient is not finite, so the command is refused and its "
                "gradient dropped; check advantages and log-probabilities, or load an earlier state of the adapter"
            )
        return ForwardResult(self.loss_sum, self.logprobs, self.waited_s) if self.done == self.units else None


@dataclass(kw_only=True)
class StepCommand(BankCommand):
    settings: AdamSettings


@dataclass(kw_only=True)
class CallCommand(BankCommand):
    """Anything else that has its place in the order of an adapter's commands."""

    function: Callable[[], Any]
    removes: bool = False
    """Whether later commands do not find the adapter."""
    running: bool = False
