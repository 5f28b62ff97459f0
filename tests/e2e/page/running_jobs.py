"""Jobs whose trainers a test plays, and games of several policies."""

from __future__ import annotations

import asyncio
from typing import Any

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.types.telemetry import MetricPoint
from tests.e2e.page.conftest import Tab

PARTS = ("curves", "timeline", "episodes", "data", "log", "config", "checkpoints")


class Trainer:
    """Says what a trainer would, point by point."""

    def __init__(self, bus: Bus, job: str, source: str = "trainer") -> None:
        self._bus, self._job, self._source = bus, job, source
        self._seq = 0

    async def says(self, step: int, values: dict[str, float]) -> None:
        point = MetricPoint(
            job=self._job,
            source=self._source,
            incarnation="one",
            seq=self._seq,
            time=1e9 + step,
            step=step,
            values=values,
        )
        self._seq += 1
        await self._bus.emit(METRIC, point, job=self._job, source=self._source)


def reward(mean: float) -> dict[str, float]:
    return {"reward/mean": mean, "reward/std": 0.1, "step_seconds": 0.5, "exact": mean / 2}


async def saved(tab: Tab, button: str, *, exact: bool = False) -> bytes:
    """The file that it gives."""
    async with tab.page.expect_download() as download:
        await tab.page.get_by_role("button", name=button, exact=exact).click()
    path = await (await download.value).path()
    return await asyncio.to_thread(path.read_bytes)


def value(tab: Tab, chart: str) -> Any:
    return tab.page.locator(f'[data-chart="{chart}"] .legend b').first


def played(seat: str, sees: str, says: str, turn: int, version: str) -> dict[str, Any]:
    words = {"role": "assistant", "content": says, "turn": turn, "tokens": [1, 2], "versions": [version], "reward": 0.5}
    return {
        **{"seat": seat, "stream": "", "policy": seat, "reward": 0.5},
        "messages": [{"role": "user", "content": sees}, words],
        "tokens": {
            **{"text": [sees, says], "ids": [4, 5], "mask": [0, 1], "logprobs": [0, -0.7], "left_out": 0},
            **{"advantages": [0, 1.5] if seat == "speaker" else None, "versions": [[1, 2, version]]},
        },
    }
