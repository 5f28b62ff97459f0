"""Concurrent lookups of a key share one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from opentinker.shared.single_flight import SingleFlight
from tests.conftest import until


class Source:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.fault: Exception | None = None

    def look(self, key: str) -> Callable[[], Coroutine[Any, Any, int]]:
        async def call() -> int:
            self.asked.append(key)
            await self.may_answer.wait()
            if self.fault is not None:
                raise self.fault
            return len(self.asked)

        return call


async def test_who_asks_meanwhile_and_soon_after_gets_the_same() -> None:
    source = Source()
    recent = SingleFlight[int](60.0)
    together = [asyncio.create_task(recent.get("a", source.look("a"))) for _ in range(5)]
    other = asyncio.create_task(recent.get("b", source.look("b")))
    await until(lambda: len(source.asked) == 2)
    together[0].cancel()  # the others go on
    source.may_answer.set()
    assert await asyncio.gather(*together[1:], other) == [*4 * [2], 2]
    assert await recent.get("a", source.look("a")) == 2 and source.asked == ["a", "b"]


async def test_what_is_old_is_looked_up_again_and_forgotten() -> None:
    source = Source()
    source.may_answer.set()
    recent = SingleFlight[int](0.0)
    assert await recent.get("a", source.look("a")) == 1
    await asyncio.sleep(0.001)
    assert await recent.get("b", source.look("b")) == 2 and list(recent._calls) == ["b"]
    await asyncio.sleep(0.001)
    assert await recent.get("a", source.look("a")) == 3


async def test_a_fault_is_for_who_waits_and_is_not_kept() -> None:
    source = Source()
    source.fault = OSError("away")
    recent = SingleFlight[int](60.0)
    waiting = [asyncio.create_task(recent.get("a", source.look("a"))) for _ in range(2)]
    await until(lambda: source.asked == ["a"])
    source.may_answer.set()
    for one in waiting:
        with pytest.raises(OSError, match="away"):
            await one
    source.fault = None
    assert await recent.get("a", source.look("a")) == 2
