"""Metrics of a job that serves the Tinker API: of all its models together, and the loss of each.

tokens, tokens_per_s, queue_seconds, models     of the trainer, once a second while it has commands
models/MODEL/loss, /tokens, /queue_seconds      of a model's passes since its last point; a loss is that of a token.
                                                Models of other tenants have none, because the job's tenant reads them
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opentinker.services.trainer.progress_curve import ProgressCurve
from opentinker.shared.data.step_log import TRAINER_SOURCE
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import ModelProgress

REPORT_S = 1.0
MOST_CURVES = 200
"""Models in memory that have a curve; later ones have none until others leave."""


@dataclass
class _Passes:
    """Since the last point."""

    commands: int = 0
    loss: float = 0.0
    learned: float = 0.0
    """Tokens with a factor in the loss."""
    tokens: int = 0
    queue_s: float = 0.0


@dataclass
class _Curve:
    source: MetricSource | None
    """None: the model is of another tenant than the job, whose metrics the job's tenant reads."""
    losses: ProgressCurve = field(default_factory=ProgressCurve)
    progress: ModelProgress | None = None
    """None: not read yet. It outlives the lease."""
    passes: _Passes = field(default_factory=_Passes)
    step: int = 0
    """Commands forward_backward of the model so far."""
    steps: int | None = None
    """Optimizer steps, if there was one since the last point."""


class ModelCurves:
    def __init__(self, bus: Bus, job: str, records: TinkerStore, models: Callable[[], int]) -> None:
        """`models`: returns how many are in memory."""
        self._bus, self._job, self._records, self._models = bus, job, records, models
        self.tenant = ""
        """The job's tenant."""
        self._source = MetricSource(bus, job, TRAINER_SOURCE)
        self._curves: dict[str, _Curve] = {}
        self._passes, self._reported_at = _Passes(), time.monotonic()
        self.tokens = 0
        """Sum over all passes so far."""
        self.steps = 0
        """Optimizer steps of all models so far."""
        self.loss: float | None = None
        """Mean loss of a token in the passes of the last point."""
        self.curve = ProgressCurve()
        self._commands = 0

    def add_pass(
        self, model: str, tenant: str, step: int, *, loss: float, learned: float, tokens: int, queue_s: float
    ) -> None:
        """Count a pass of a tenant's model. `step`: its number among those of the model."""
        self.tokens += tokens
        self._commands += 1
        counted = [self._passes]
        if (curve := self._curve(model, tenant)) is not None:
            curve.step = step
            counted.append(curve.passes)
        for passes in counted:
            passes.commands += 1
            passes.loss += loss
            passes.learned += learned
            passes.tokens += tokens
            passes.queue_s += queue_s

    def add_step(self, model: str, tenant: str, steps: int) -> None:
        """Count an optimizer step. `steps`: those of the model, this one included."""
        self.steps += 1
        if (curve := self._curve(model, tenant)) is not None:
            curve.steps = steps

    def _curve(self, model: str, tenant: str) -> _Curve | None:
        if model not in self._curves and len(self._curves) < MOST_CURVES:
            own = tenant == self.tenant
            prefix = f"models/{model}/"
            source = MetricSource(self._bus, self._job, TRAINER_SOURCE, prefix=prefix) if own else None
            self._curves[model] = _Curve(source)
        return self._curves.get(model)

    async def report(self) -> None:
        """Send the points since the last call, and write the progress of models."""
        now = time.monotonic()
        elapsed_s, self._reported_at = now - self._reported_at, now
        passes, self._passes = self._passes, _Passes()
        if passes.commands:
            if passes.learned:
                self.loss = passes.loss / passes.learned
                self.curve.add({"loss": self.loss})
            values = {
                "tokens": float(passes.tokens),
                "tokens_per_s": passes.tokens / max(elapsed_s, 1e-3),
                "queue_seconds": passes.queue_s / passes.commands,
                "models": float(self._models()),
            }
            await self._source.emit(
                self._commands, {f"{TRAINER_SOURCE}/{name}": value for name, value in values.items()}
            )
        for model, curve in list(self._curves.items()):
            if curve.passes.commands or curve.steps is not None:
                await self._report_model(model, curve)

    async def _report_model(self, model: str, curve: _Curve) -> None:
        if curve.progress is None:
            curve.progress = await self._records.progress(model)
            curve.losses.values = list(curve.progress.curve)
        done, curve.passes = curve.passes, _Passes()
        steps, curve.steps = curve.steps, None
        changes: dict[str, Any] = {} if steps is None else {"steps": steps}
        if done.commands:
            tokens = curve.progress.tokens + done.tokens
            changes |= {"passes": curve.step, "tokens": tokens, "queue_s": done.queue_s / done.commands}
            shown = {"tokens": float(done.tokens), "queue_seconds": done.queue_s / done.commands}
            if done.learned:
                shown["loss"] = done.loss / done.learned
                curve.losses.add(shown)
                changes |= {"loss": shown["loss"], "curve": [float(f"{value:.4g}") for value in curve.losses.values]}
            if curve.source is not None:
                await curve.source.emit(curve.step, shown)
        curve.progress = msgspec.structs.replace(curve.progress, **changes)
        await self._records.set_progress(model, curve.progress)

    def forget(self, model: str) -> None:
        """The model leaves the memory."""
        curve = self._curves.pop(model, None)
        if curve is not None and curve.source is not None:
            curve.source.close()

    def close(self) -> None:
        for model in list(self._curves):
            self.forget(model)
        self._source.close()
