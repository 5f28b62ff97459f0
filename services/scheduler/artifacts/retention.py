"""Selects which checkpoints of a job to keep. Pure values: `archiver.py` collects the input and carries out the
decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView

DAY_S = 86_400.0
EVALUATED = "val/"
"""Names of metrics of evaluations begin so."""


@dataclass(frozen=True)
class Rule:
    """[artifacts] of a job's spec."""

    last: int | None = None
    """None: all."""
    best: int = 0
    metric: str = ""
    lowest: bool = False
    every: int | None = None
    """Steps between evaluations, if the metric is of evaluations; None: of every step, present before its
    checkpoint."""
    at_start: bool = True
    steps: int = 0
    """Steps of the job: the last one is evaluated too."""
    expire_days: float | None = None

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Rule:
        said = spec.get("artifacts", {})  # a job from before there were rules has none
        validation = spec.get("validation") or {}
        last = None if said.get("keep_all") else said.get("keep_last") or spec.get("train", {}).get("keep_checkpoints")
        return cls(
            last=last,
            best=said.get("keep_best", 0),
            metric=said.get("best_metric") or "",
            lowest=said.get("best_is") == "lowest",
            every=validation.get("every") if (said.get("best_metric") or "").startswith(EVALUATED) else None,
            at_start=validation.get("at_start", True),
            steps=spec.get("train", {}).get("steps", 0),
            expire_days=said.get("expire_days"),
        )

    def is_due(self, step: int) -> bool:
        """An evaluation of it says what the metric is."""
        if self.every is None:
            return False
        return step == self.steps or (step % self.every == 0 if step else self.at_start)

    def stay(self, found: Sequence[CheckpointView]) -> set[int]:
        """Steps of those that stay, of all that there are, oldest first."""
        if self.last is None:
            return {held.manifest.step for held in found}
        kept = {held.manifest.step for held in found[-self.last :]}
        kept |= {held.manifest.step for held in found if self.best and held.awaited}
        measured = [(held.metric, held.manifest.age) for held in found if held.metric is not None]
        measured.sort(key=lambda one: (-one[0] if self.lowest else one[0], one[1]), reverse=True)
        return kept | {step for _, (_, step) in measured[: self.best]}

    def __str__(self) -> str:
        """In words, for people."""
        said = "all checkpoints" if self.last is None else f"the newest {self.last}"
        if self.best:
            said += f" and the {self.best} with the {'lowest' if self.lowest else 'highest'} {self.metric}"
        days = self.expire_days
        return said + (f", until {days:g} day{'s' if days != 1 else ''} after its end" if days is not None else "")
