"""Reads metrics at the steps of checkpoints from the files that the trainer writes with them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.services.scheduler.artifacts.retention import EVALUATED, Rule
from opentinker.shared.types.manifest import Manifest

Values = dict[tuple[int, int], float | None]
"""By epoch and step, in every line; None: without the metric."""


class Measured:
    """Files are read again when they have grown."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, str], tuple[int, Values]] = {}

    def of(self, home: Path, found: Sequence[CheckpointView], rule: Rule, *, over: bool) -> list[CheckpointView]:
        """Blocking. The same, with what is known of the metric. `over`: the job is, and nothing more will come."""
        if all(held.metric is not None for held in found):
            return list(found)
        values = self._values(
            home / ("validation.jsonl" if rule.metric.startswith(EVALUATED) else "metrics.jsonl"), rule.metric
        )
        return [held if held.metric is not None else _measured(held, values, rule, over=over) for held in found]

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


def _measured(held: CheckpointView, values: Values, rule: Rule, *, over: bool) -> CheckpointView:
    """Evaluations arrive in the order of their steps: one of a later step means that this one will not arrive."""
    epoch, step = held.manifest.age
    own = [(e, step) for e in range(epoch, -1, -1) if (e, step) in values and _leads_to(held.manifest, e, step)]
    later = any(e >= epoch and s >= step for e, s in values)
    awaited = rule.is_due(step) and not (over or own or later)
    return replace(held, metric=values[own[0]] if own else None, awaited=awaited)


def _leads_to(manifest: Manifest, epoch: int, step: int) -> bool:
    """The weights of a step may be of an earlier epoch than the trainer that saved them: one that resumed there. What
    an earlier one did beyond that is of other weights."""
    if epoch == manifest.epoch:
        return True
    return epoch in manifest.resumed and all(step <= at for e, at in manifest.resumed.items() if e > epoch)
