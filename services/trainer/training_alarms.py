"""Both alarms over training metrics: their metrics and events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from opentinker.services.trainer.collapse_alarm import CollapseAlarm, Ring
from opentinker.services.trainer.mismatch_alarm import WATCHED, WINDOW, MismatchAlarm
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.spec.train import ALARMS, TrainSpec

log = structlog.get_logger()


class TrainingAlarms:
    def __init__(
        self, train: TrainSpec, algorithm: AlgorithmSpec, event: Callable[[str, dict[str, object]], Awaitable[None]]
    ) -> None:
        self._event = event
        self._mismatch = MismatchAlarm()
        self._collapse = CollapseAlarm(train, algorithm)

    @property
    def active(self) -> Mapping[str, Ring]:
        """Active alarms of collapse, by name."""
        return self._collapse.active

    def restore(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add the steps of the lineage that the trainer resumes."""
        for line in lines[-WINDOW:]:
            self._mismatch.update(line)
        for line in lines:
            self._collapse.update(line, line["step"])

    async def update(self, step: int, values: dict[str, float]) -> None:
        """Update the alarms, and add their state to `values`."""
        grown, collapsed = self._mismatch.update(values), self._collapse.update(values, step)
        if any(name in values for name in WATCHED):
            values["mismatch/alarm"] = float(bool(self._mismatch.active))
        if "reward/mean" in values:
            values["collapse/alarm"] = float(bool(self.active))
            values |= {f"alarm/{name}": float(name in self.active) for name in ALARMS}
        for name in grown:
            log.warning("mismatch_alarm", metric=name, value=values[name])
            await self._event("mismatch_alarm", {"step": step, "metric": name, "value": values[name]})
        for ring in collapsed:
            log.warning("collapse_alarm", step=step, **ring.detail)
            await self._event("collapse_alarm", {"step": step, **ring.detail})
