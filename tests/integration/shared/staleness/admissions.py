"""Admission states that several of these tests begin with."""

from __future__ import annotations

from typing import Any

from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store


async def restored(ours: Admission, **changes: Any) -> Admission:
    fields: dict[str, Any] = {"step": 0, "max_staleness": 1, "groups_per_batch": 4, "total": 100, "discarded": {}}
    await ours.restore(**(fields | changes))
    return ours


PAIR = ("a", "b")


async def policy(store: Store, job: str, name: str, epoch: int = 1, **changes: Any) -> Admission:
    """The trainer of one of two policies."""
    return await restored(Admission(store.redis, job, epoch, policies=PAIR, policy=name), **changes)


async def pair(
    store: Store, job: str, batches: tuple[int, int] = (4, 2), **changes: Any
) -> tuple[Admission, Admission]:
    """Two trainers of one job, which take as many groups a step."""
    a, b = [
        await policy(store, job, name, groups_per_batch=batch, **changes)
        for name, batch in zip(PAIR, batches, strict=True)
    ]
    return a, b
