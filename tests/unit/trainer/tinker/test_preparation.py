"""Passes of a tenant's models are prepared one at a time, when there is room for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.trainer.tinker.model_commands import ModelCommands
from opentinker.services.trainer.tinker.tinker_lease import TinkerLease
from opentinker.shared.types.tinker import Datum, ForwardBackward

BODY = ForwardBackward(data=[Datum(tokens=bytes(12), targets=bytes(12))], loss="cross_entropy")


class Bank:
    """Has room as often as `room` is released."""

    def __init__(self) -> None:
        self.room, self.asked, self.sent = asyncio.Semaphore(0), list[int](), 0

    async def wait_for_room(self, _: str, tokens: int) -> None:
        self.asked.append(tokens)
        await self.room.acquire()

    def send_units(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        self.sent += 1
        return asyncio.get_running_loop().create_future()


async def test_data_are_prepared_when_there_is_room_and_one_pass_of_a_tenant_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank, prepared, anything = Bank(), list[str](), SimpleNamespace(epoch=1)
    of: dict[str, Any] = {name: anything for name in ("ctx", "lease", "spec", "records", "curves", "spent")}
    shared = TinkerLease(**(of | {"bank": bank}))
    models = [ModelCommands(shared, f"m{number}") for number in range(3)]
    for model in models:
        model.tenant = "t"

        def prepare(*_: Any, name: str = model.model) -> tuple[list[Any], list[Any]]:
            prepared.append(name)
            return [], []

        monkeypatch.setattr(model, "_prepare", prepare)
    begun = [asyncio.create_task(model._begin_pass(BODY, 0.0, repeated=False)) for model in models]

    async def quiet() -> tuple[int, int]:
        for _ in range(20):
            await asyncio.sleep(0)
        return len(prepared), bank.sent

    assert await quiet() == (0, 0) and bank.asked == [3], "the others wait for the first one"
    for counts in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)):
        bank.room.release()
        assert await quiet() == counts
    for work in await asyncio.gather(*begun):
        work.close()  # type: ignore[attr-defined]
