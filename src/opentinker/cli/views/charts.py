"""A job's metric points as series by step, and those series as lines of text (braille: two by four dots a cell)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from opentinker.shared.types.core import split_part
from opentinker.shared.types.metric_names import opponent_of

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at [row][column] of one braille character."""
BLANK = 0x2800
SILENT_S = 5.0
"""A rollout worker reports every second in which it finished something; one silent for longer generates nothing."""


class Curves:
    """The newest value of every metric at every step: a step trained again after a restart replaces the old one."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        """The trainer's points."""
        self.times: dict[int, float] = {}
        """Unix seconds of each step."""
        self.validations: dict[int, dict[str, float]] = {}
        """Points of evaluations, by the step of their weights."""
        self.generated: list[float] = []
        """Tokens per second of all rollout workers together, one value per report."""
        self._reported: list[float] = []
        """Unix seconds of each of them, in order."""
        self._rates: dict[str, tuple[float, float]] = {}
        """By rollout worker: tokens per second and the time of the report."""
        self._totals: dict[str, float] = {}
        """Tokens so far, by rollout worker, as last reported."""
        self._tokens = 0.0
        """Since the first report, by all rollout workers."""
        self._span: tuple[float, float] | None = None
        """Times of the first and the last report."""
        self.by_policy: dict[str, Curves] = {}
        """Curves of each policy, in a job with several. `steps` then holds the values of all, named POLICY/METRIC."""

    def add(self, points: Iterable[Mapping[str, Any]]) -> list[int]:
        """Returns the steps that are new or changed."""
        changed = []
        for point in points:
            values: dict[str, float] = point["values"]
            if (policy := split_part(str(point["source"]))[1]) != "":
                changed += self._add_policy(policy, point)
            elif "reward/mean" in values or "loss" in values:
                step = int(point["step"])
                for later in [s for s in self.steps if s > step and self.times[s] < point["time"]]:
                    del self.steps[later], self.times[later]  # rolled back
                self.steps[step], self.times[step] = values, point["time"]
                changed.append(step)
            elif "val/episodes" in values:
                self.validations[int(point["step"])] = values
            elif "val/loss" in values:  # of the step's weights, not of the step
                step = int(point["step"])
                self.steps[step] = {**self.steps.get(step, {}), **values}
                self.times.setdefault(step, point["time"])
            elif made := next((kind for kind in ("rollout", "serving") if f"{kind}/tokens_per_s" in values), None):
                rate, total = values[f"{made}/tokens_per_s"], values[f"{made}/tokens"]
                self._report(str(point["source"]), float(point["time"]), rate, total)
        return list(dict.fromkeys(changed))

    def _add_policy(self, policy: str, point: Mapping[str, Any]) -> list[int]:
        values, step = point["values"], int(point["step"])
        own = {name.removeprefix(f"{policy}/"): value for name, value in values.items()}
        changed = self.by_policy.setdefault(policy, Curves()).add([{**point, "source": "trainer", "values": own}])
        self.steps[step] = {**self.steps.get(step, {}), **values}
        self.times[step] = point["time"]
        return changed

    @property
    def policies(self) -> dict[str, Curves]:
        """Return the policies by name; the job's own under the empty name if it has one policy."""
        return self.by_policy or {"": self}

    def _report(self, worker: str, time: float, rate: float, total: float) -> None:
        self._rates[worker] = (rate, time)
        self.generated.append(sum(rate for rate, then in self._rates.values() if time - then <= SILENT_S))
        self._reported.append(max(time, self._reported[-1] if self._reported else time))
        before = self._totals.get(worker, 0.0)
        self._totals[worker] = total
        if self._span is not None:
            self._tokens += total - before if total >= before else total  # a restarted worker counts from 0
        self._span = (time, time) if self._span is None else (self._span[0], max(self._span[1], time))

    def generated_at(self, step: int) -> float | None:
        """Return the rate of the last report before a step ended, of the first report if none was earlier."""
        if not self.generated:
            return None
        return self.generated[max(0, bisect_right(self._reported, self.times.get(step, math.inf)) - 1)]

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate over the whole time between the first report and the last."""
        if self._span is None or self._span[0] == self._span[1]:
            return None
        return self._tokens / (self._span[1] - self._span[0])

    def games_won(self) -> tuple[str, list[float]] | None:
        """Return a title and the win rate in each evaluation, against the first opponent; None without games."""
        newest = self.validations[max(self.validations)] if self.validations else {}
        for name in newest:
            if (opponent := opponent_of(name)) is not None:
                rates = [self.validations[step].get(name) for step in sorted(self.validations)]
                title = f"games won against {opponent}" if opponent else "games won"
                return title, [rate for rate in rates if rate is not None]
        return None

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def series(self, name: str) -> list[float]:
        """The metric at each step that has it, in order."""
        return [self.steps[step][name] for step in self.having(name)]

    def mean(self, name: str, steps: Sequence[int]) -> float | None:
        values = [self.steps[step][name] for step in steps if step in self.steps and name in self.steps[step]]
        return sum(values) / len(values) if values else None

    def recent(self, name: str, steps: int = 10) -> float | None:
        """Mean over the last steps that have it."""
        return self.mean(name, self.having(name)[-steps:])

    def having(self, name: str) -> list[int]:
        """The steps that have the metric, in order."""
        return [step for step in sorted(self.steps) if name in self.steps[step]]

    def seconds_per_step(self, steps: int = 20) -> float | None:
        """Wall clock between the last steps."""
        order = sorted(self.steps)[-steps - 1 :]
        if len(order) < 2:
            return None
        return (self.times[order[-1]] - self.times[order[0]]) / (order[-1] - order[0])


def bins(values: Sequence[float], count: int) -> list[float]:
    """The series shortened to at most `count` means of equal shares."""
    if len(values) <= count:
        return list(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def chart(values: Sequence[float], width: int, height: int, *, low: float | None = None) -> list[str]:
    """`height` lines of at most `width` characters: the curve, with its largest and smallest value at the left."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ["(no values yet)", *[""] * (height - 1)]
    bottom, top = min(finite) if low is None else min(low, *finite), max(finite)
    labels = [short(top), *[""] * (height - 2), short(bottom)]
    margin = max(map(len, labels))
    columns = max(1, width - margin - 2)
    points = bins(finite, columns * 2)
    rows = height * 4
    span = (top - bottom) or 1.0
    levels = [round((value - bottom) / span * (rows - 1)) for value in points]
    cells = [[0] * columns for _ in range(height)]
    last = levels[0]
    for x, level in enumerate(_stretched(levels, columns * 2) if len(levels) > 1 else levels):
        step = 1 if level >= last else -1
        for dot in range(last + step if level != last else level, level + step, step):  # joined to its neighbour
            y = rows - 1 - dot
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
        last = level
    return [
        f"{label:>{margin}} ┤" + "".join(chr(BLANK + cell) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]


def _stretched(levels: Sequence[int], count: int) -> list[int]:
    """Linear interpolation to `count` points."""
    places = [x * (len(levels) - 1) / (count - 1) for x in range(count)]
    left = [min(int(at), len(levels) - 2) for at in places]
    return [round(levels[i] + (levels[i + 1] - levels[i]) * (at - i)) for i, at in zip(left, places, strict=True)]


def short(value: float) -> str:
    """Three figures: 0.31, 1530, 12k, 3e-07."""
    size = abs(value)
    if size != 0 and size < 0.001:
        return f"{value:.0e}"
    if size >= 10000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
