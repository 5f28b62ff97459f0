"""Selects which checkpoints of a job to keep. `archiver.py` carries out the decision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.shared.types.manifest import Manifest

DAY_S = 86_400.0
EVALUATION = "val/"
"""Prefix of the metrics of evaluations."""


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
            every=validation.get("every") if (said.get("best_metric") or "").startswith(EVALUATION) else None,
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


Values = dict[tuple[int, int], float | None]
"""By epoch and step, in every line; None: without the metric."""


class CheckpointMetrics:
    """Reads metrics at the steps of checkpoints from the files that the trainer writes with them; again when they have
    grown."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, str], tuple[int, Values]] = {}

    def add(self, home: Path, found: Sequence[CheckpointView], rule: Rule, *, over: bool) -> list[CheckpointView]:
        """Return the checkpoints with what is known of the metric. Blocking. `over`: the job has ended."""
        if all(held.metric is not None for held in found):
            return list(found)
        values = self._values(
            home / ("validation.jsonl" if rule.metric.startswith(EVALUATION) else "metrics.jsonl"), rule.metric
        )
        return [held if held.metric is not None else _with_metric(held, values, rule, over=over) for held in found]

    def _values(self, file: Path, metric: str) -> Values:
        size = file.stat().st_size if file.exists() else 0
        before = self._read.get((file, metric))
        if before is not None and before[0] == size:
            return before[1]
        values: Values = {}
        for raw in file.read_bytes().splitlines() if size else ():
            with contextlib.suppress(orjson.JSONDecodeError):  # half a line, of a process that was killed
                line = orjson.loads(raw)
                value = line.get(metric)
                known = isinstance(value, int | float) and math.isfinite(value)
                values[line["epoch"], line["step"]] = float(value) if known else None
        self._read[file, metric] = (size, values)
        return values


def _with_metric(held: CheckpointView, values: Values, rule: Rule, *, over: bool) -> CheckpointView:
    """Evaluations arrive in the order of their steps: one of a later step means that this one will not arrive."""
    epoch, step = held.manifest.age
    own = [(e, step) for e in range(epoch, -1, -1) if (e, step) in values and _is_ancestor(held.manifest, e, step)]
    later = any(e >= epoch and s >= step for e, s in values)
    awaited = rule.is_due(step) and not (over or own or later)
    return replace(held, metric=values[own[0]] if own else None, awaited=awaited)


def _is_ancestor(manifest: Manifest, epoch: int, step: int) -> bool:
    """The weights of a step may be of an earlier epoch than the trainer that saved them: one that resumed there. What
    an earlier one did beyond that is of other weights."""
    if epoch == manifest.epoch:
        return True
    return epoch in manifest.resumed and all(step <= at for e, at in manifest.resumed.items() if e > epoch)
