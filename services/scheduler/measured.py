"""What a metric was at the steps of checkpoints, from the files that the trainer writes beside them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from opentinker.services.scheduler.checkpoints import Held

Values = dict[tuple[int, int], float]


class Measured:
    """Files are read again when they have grown."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, str], tuple[int, Values]] = {}

    def of(self, home: Path, found: Sequence[Held], metric: str) -> list[Held]:
        """Blocking. The same, with what is known of the metric."""
        if all(held.metric is not None for held in found):
            return list(found)
        values = self._values(home / ("validation.jsonl" if metric.startswith("val/") else "metrics.jsonl"), metric)
        return [held if held.metric is not None else replace(held, metric=_at(values, held)) for held in found]

    def _values(self, file: Path, metric: str) -> Values:
        """By epoch and step."""
        size = file.stat().st_size if file.exists() else 0
        before = self._read.get((file, metric))
        if before is not None and before[0] == size:
            return before[1]
        values: Values = {}
        for raw in file.read_bytes().splitlines() if size else ():
            with contextlib.suppress(orjson.JSONDecodeError):  # half a line, of a process that was killed
                line = orjson.loads(raw)
                if isinstance(value := line.get(metric), int | float) and math.isfinite(value):
                    values[line["epoch"], line["step"]] = float(value)
        self._read[file, metric] = (size, values)
        return values


def _at(values: Values, held: Held) -> float | None:
    """The weights of a step may be of an earlier epoch than the trainer that saved them: one that resumed there."""
    epoch, step = held.manifest.age
    return next((values[e, step] for e in range(epoch, -1, -1) if (e, step) in values), None)
