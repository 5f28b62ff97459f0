"""What intake discards while a step is made stands under the same number in the assembler and in Redis."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.intake import Intake
from opentinker.shared.types.core import Discard, WeightVersion
from tests.support.factories import make_group, make_spec


async def test_a_step_that_ends_meanwhile_changes_no_number_and_a_checkpoint_waits() -> None:
    told: list[tuple[int, Discard]] = []
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def discard(batch: int, reason: Discard, _: list[int]) -> None:
        told.append((batch, reason))
        asked.set()
        await may_answer.wait()

    async def settled() -> int:
        return 99

    async def emit(*_: object, **__: object) -> None: ...

    lease, bus = SimpleNamespace(job="j"), SimpleNamespace(emit=emit)
    reporter: Any = SimpleNamespace(ctx=SimpleNamespace(bus=bus), lease=lease, policy="a", spec=make_spec())
    admission: Any = SimpleNamespace(discard=discard)
    joint: Any = SimpleNamespace(rests=lambda _: False, watch=lambda _: None)
    assembler = Assembler(max_staleness=1, epoch=1, keep=1)
    for seq, version in ((0, 0), (1, 4), (2, 4)):
        assembler.add(seq + 1, make_group(seq=seq, versions=[WeightVersion(1, version)]))
    steps = [4]
    intake: Any = Intake(reporter, admission, assembler, joint, lambda: steps[0])
    intake._consumer = SimpleNamespace(settled=settled)
    discarding = asyncio.create_task(intake.discard_unfit())
    await asked.wait()
    steps[0] = 5
    accounts = asyncio.create_task(intake.account())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not accounts.done(), "Redis does not have all of it yet"
    may_answer.set()
    await discarding
    assert told == [(5, Discard.STALE), (5, Discard.SURPLUS)]
    assert (await accounts)[2] == {"stale": 1, "surplus": 1}
