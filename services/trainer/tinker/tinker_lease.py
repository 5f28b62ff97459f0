"""State that the models of one lease share."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import structlog

from opentinker.services.trainer.tinker.model_curves import ModelCurves
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.subjects import ANSWERED
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.tinker.billing import TinkerSpent
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import Lease
from opentinker.shared.types.tinker import Answer, Answered, Forwarded, Result, Saved, tinker_place

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.bank_loop import BankLoop

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
PAUSE_MOST_S = 60.0


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
    stuck: set[str] = field(default_factory=set)
    """Models that cannot go on until the disk or the memory of this machine lets them."""
    _preparations: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def place(self, model: str) -> Path:
        return tinker_place(self.ctx.settings.data_dir, model)

    @property
    def queue_reason(self) -> str:
        """Say what commands wait for."""
        stuck = f", {len(self.stuck)} waiting for disk or memory of the trainer" if self.stuck else ""
        return self.bank.queue_reason + stuck

    async def pause(self, model: str, problem: object, pause_s: float) -> float:
        """Wait before another try of a model, which is then among `stuck`. Returns how long to wait before the next."""
        log.error("model_waits", model=model, error=str(problem), seconds=pause_s)
        self.stuck.add(model)
        await sleep(pause_s)
        return min(2 * pause_s, PAUSE_MOST_S)

    def one_copy(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Hold this while holding a copy of a model: of those that train all weights there is memory for one."""
        return self.bank.copying if self.spec.tinker.full_weights else contextlib.nullcontext()

    def copy(self, tenant: str, size: int) -> contextlib.AbstractAsyncContextManager[Any]:
        """Hold this from before a copy of this size is made of a model until it is written."""
        return self.one_copy() if self.spec.tinker.full_weights else self.bank.copies.holding(tenant, size)

    async def write(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call what writes files of a model, in a thread."""
        async with self.bank.copies.writing:
            return await asyncio.to_thread(function, *args, **options)

    def preparation(self, tenant: str) -> asyncio.Lock:
        """Hold this while preparing a pass of the tenant: prepared data are several times as large as the command."""
        return self._preparations.setdefault(tenant, asyncio.Lock())

    async def answer(self, request: str, result: Result, tenant: str) -> None:
        """Keep the answer unless there is one, count what the request of `tenant` had, and tell who waits for it."""
        is_kept = await self.records.answer(Answer(request=request, result=result))
        await self.ctx.bus.emit(ANSWERED, Answered(request=request), job=self.lease.job)
        if is_kept and (counts := _counts(result)):
            session = request.partition(":")[0]
            await TinkerSpent(self.ctx.store.redis).add(tenant, session, self.spec.model.base, counts)


def _counts(result: Result) -> dict[str, int]:
    """Return what a request cost by its result, by kind."""
    if isinstance(result, Forwarded):
        places = zip(result.logprobs, result.widths, strict=True)
        return {"training": sum(len(logprobs) // (4 * width) for logprobs, width in places)}
    return {"checkpoint": 1} if isinstance(result, Saved) and result.path else {}
