"""Copies of adapters: bounded in bytes and by tenant, taken in turn, and given back."""

from __future__ import annotations

import asyncio

import pytest

from opentinker.services.trainer.bank import copies
from opentinker.services.trainer.bank.copies import TENANT_COPIES, Copies


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_tenant_has_few_copies_at_a_time_and_others_have_theirs() -> None:
    held = Copies()
    tasks = [asyncio.create_task(held.take("a", 1)) for _ in range(TENANT_COPIES + 2)]
    await settled()
    assert [task.done() for task in tasks] == [True] * TENANT_COPIES + [False] * 2
    await asyncio.wait_for(held.take("b", 1), 1.0)
    tasks[-1].cancel()
    tasks[0].result()()
    await settled()
    assert tasks[TENANT_COPIES].done() and held._bytes == TENANT_COPIES + 1


async def test_copies_are_bounded_in_bytes_and_a_larger_one_is_held_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COPY_BYTES", 10)
    held = Copies()
    small = await held.take("a", 4)
    large = asyncio.create_task(held.take("b", 100))
    later = asyncio.create_task(held.take("c", 4))
    await settled()
    assert not large.done() and not later.done(), "what came after a large one does not overtake it"
    small()
    await settled()
    assert large.done() and not later.done()
    large.result()()
    await settled()
    assert later.done()


async def test_one_that_is_cancelled_while_it_waits_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COPY_BYTES", 1)
    held = Copies()
    first = await held.take("a", 1)
    waiting = asyncio.create_task(held.take("b", 1))
    await settled()
    waiting.cancel()
    await asyncio.wait([waiting])
    first()
    async with asyncio.timeout(1.0), held.holding("b", 1), held._tenants["b"]:
        assert held._bytes == 1
    assert held._bytes == 0
