"""Selects which checkpoints of a job to keep. `archiver.py` carries out the decision."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import orjson

from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.shared.state.artifacts import ArtifactEntry, TrainingEvaluation
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.manifest import Manifest

DAY_S = 86_400.0
EVALUATION = "val/"
"""Prefix of the metrics of evaluations."""
EVALUATIONS = "validation.jsonl"
MAX_FILES = 10_000
"""Files of evaluations whose state is remembered."""


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
        """Describe the rule for people."""
        said = "all checkpoints" if self.last is None else f"the newest {self.last}"
        if self.best:
            said += f" and the {self.best} with the {'lowest' if self.lowest else 'highest'} {self.metric}"
        days = self.expire_days
        return said + (f", until {days:g} day{'s' if days != 1 else ''} after its end" if days is not None else "")


def used_by(active: Iterable[JobRecord]) -> dict[str, set[int]]:
    """Steps by job that jobs which are not over begin with, serve or play against."""
    used: list[str] = []
    for job in active:
        start, serving = job.spec.get("start") or {}, job.spec.get("serving") or {}
        starts = [policy.get("start") or {} for policy in job.spec.get("policies", {}).values()]
        names = [named.get("from", "") for named in (start, *starts, *serving.get("adapters", []))]
        players = [*job.spec.get("seats", {}).values(), *(job.spec.get("validation") or {}).get("against", [])]
        used += [*names, *(player.get("frozen") or "" for player in players)]
    return steps_of(used)


def steps_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Steps by job of the checkpoints among these names."""
    found: dict[str, set[int]] = {}
    for name in names:
        source, _, step = name.partition("@")
        if step.isdigit():
            found.setdefault(source, set()).add(int(step))
    return found


Values = dict[tuple[int, int], float | None]
"""By epoch and step, in every line; None: without the metric."""


class CheckpointMetrics:
    """Reads metrics at the steps of checkpoints from the files that the trainer writes with them; again when they have
    grown."""

    def __init__(self, max_values: int = 300) -> None:
        """`max_values`: metrics of an evaluation that are stored with its checkpoint, the first ones."""
        self._max_values = max_values
        self._read: dict[tuple[Path, str], tuple[int, Values]] = {}
        self._seen: dict[Path, tuple[int, frozenset[tuple[int, int, float]]]] = {}
        """Size of each file of evaluations when it was read, and epoch, step and time of the checkpoints without one: a
        checkpoint that was saved again under its epoch and step is another."""

    def add(self, home: Path, found: Sequence[CheckpointView], rule: Rule, *, over: bool) -> list[CheckpointView]:
        """Return the checkpoints with what is known of the metric. Blocking. `over`: the job has ended."""
        if all(held.metric is not None for held in found):
            return list(found)
        values = self._values(
            home / (EVALUATIONS if rule.metric.startswith(EVALUATION) else "metrics.jsonl"), rule.metric
        )
        return [held if held.metric is not None else _with_metric(held, values, rule, over=over) for held in found]

    def evaluations(self, home: Path, kept: Iterable[ArtifactEntry]) -> dict[int, TrainingEvaluation]:
        """Return the evaluations of these checkpoints by step; none if nothing is new since the last call. Blocking."""
        file, entries = home / EVALUATIONS, list(kept)
        manifests = [entry.manifest for entry in entries if entry.manifest is not None and entry.evaluation is None]
        missing = [(*manifest.age, manifest.created) for manifest in manifests]
        state = (_size_of(file), frozenset(missing))
        if not state[0] or self._seen.get(file) == state:
            return {}
        lines = {(line["epoch"], line["step"]): line for line in _lines(file)}
        if len(self._seen) >= MAX_FILES:
            self._seen.clear()
        self._seen[file] = state
        found: dict[int, TrainingEvaluation] = {}
        for manifest in [entry.manifest for entry in entries if entry.manifest is not None]:
            if (age := _newest(manifest, lines)) is not None:
                values = {n: float(v) for n, v in lines[age].items() if n.startswith(EVALUATION) and _is_finite(v)}
                first = dict(itertools.islice(values.items(), self._max_values))
                found[manifest.step] = TrainingEvaluation(finished=lines[age].get("time", 0.0), values=first)
        return found

    def _values(self, file: Path, metric: str) -> Values:
        size = _size_of(file)
        before = self._read.get((file, metric))
        if before is not None and before[0] == size:
            return before[1]
        values: Values = {}
        for line in _lines(file) if size else ():
            value = line.get(metric)
            values[line["epoch"], line["step"]] = float(value) if _is_finite(value) else None
        self._read[file, metric] = (size, values)
        return values


def _with_metric(held: CheckpointView, values: Values, rule: Rule, *, over: bool) -> CheckpointView:
    """Evaluations arrive in the order of their steps: one of a later step means that this one will not arrive."""
    epoch, step = held.manifest.age
    own = _newest(held.manifest, values)
    later = any(e >= epoch and s >= step for e, s in values)
    awaited = rule.is_due(step) and not (over or own or later)
    return replace(held, metric=values[own] if own else None, awaited=awaited)


def _newest(manifest: Manifest, lines: Collection[tuple[int, int]]) -> tuple[int, int] | None:
    """Return epoch and step of the newest of these lines that is about the weights; None without one."""
    epoch, step = manifest.age
    own = ((e, step) for e in range(epoch, -1, -1) if (e, step) in lines and _is_ancestor(manifest, e, step))
    return next(own, None)


def _is_ancestor(manifest: Manifest, epoch: int, step: int) -> bool:
    """The weights of a step may be of an earlier epoch than the trainer that saved them: one that resumed there. What
    an earlier one did beyond that is of other weights."""
    if epoch == manifest.epoch:
        return True
    return epoch in manifest.resumed and all(step <= at for e, at in manifest.resumed.items() if e > epoch)


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for raw in file.read_bytes().splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):  # half a line, of a process that was killed
            yield orjson.loads(raw)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
