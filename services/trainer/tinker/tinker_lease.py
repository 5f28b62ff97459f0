"""State that the models of one lease share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker.services.trainer.tinker.model_curves import ModelCurves
from opentinker.shared.messaging.subjects import ANSWERED
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.tinker import TinkerStore
from opentinker.shared.types.core import Lease
from opentinker.shared.types.tinker import Answer, Answered, Result, tinker_place

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.bank_loop import BankLoop


@dataclass(frozen=True)
class TinkerLease:
    ctx: Context
    lease: Lease
    spec: JobSpec
    bank: BankLoop
    records: TinkerStore
    curves: ModelCurves
    spent: Counter[str]
    """Costs of the lease, see usage.py."""

    def place(self, model: str) -> Path:
        return tinker_place(self.ctx.settings.data_dir, model)

    async def answer(self, request: str, result: Result) -> None:
        """Keep the answer unless there is one, and tell who waits for it."""
        await self.records.answer(Answer(request=request, result=result))
        await self.ctx.bus.emit(ANSWERED, Answered(request=request), job=self.lease.job)
