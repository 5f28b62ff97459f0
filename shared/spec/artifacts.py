"""The table of rules for keeping artifacts: which and for how long. The scheduler applies them during the job and
afterwards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.types.mistakes import mistake, unused


class ArtifactSpec(SpecPart):
    keep_last: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of newest checkpoints that stay in the artifact store; default: train.keep_checkpoints. Until the job is
    over, those from which its trainer may resume stay too."""
    keep_all: bool = False
    """Keep all checkpoints."""
    keep_best: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Number of checkpoints with the best `best_metric` that stay in addition."""
    best_metric: str | None = None
    """Name of a metric of the trainer at the checkpoint's step, e.g. "reward/mean", or of the evaluation of its
    weights, e.g. "val/exact"; a checkpoint without it is never among the best. One whose evaluation is pending is kept
    until it has finished."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Direction of `best_metric`."""
    expire_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    """Days after the job's end until its artifacts, metrics, log and timeline are deleted, except checkpoints that are
    published or in use; default: never."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.keep_all:
            for name in ("keep_last", "keep_best"):
                if value := getattr(self, name):
                    found.append(mistake(name, value, "does not go with keep_all = true"))
        if self.keep_best and not self.best_metric:
            problem = 'is needed for keep_best: the name of a metric, e.g. "reward/mean"'
            found.append(mistake("best_metric", self.best_metric, problem))
        if not self.keep_best:
            problem = "does not apply without keep_best"
            given = {"best_metric": self.best_metric} | ({"best_is": "lowest"} if self.best_is == "lowest" else {})
            found += [mistake(n, v, problem) for n, v in given.items() if v is not None]
        return found


def settle_best(artifacts: ArtifactSpec, *, evaluated: bool) -> list[dict[str, Any]]:
    """Return mistakes where nothing is evaluated."""
    named = artifacts.best_metric
    if evaluated or named is None or not named.startswith("val/"):
        return []
    problem = "is of evaluations, and this job has none: add [validation] (sft, dpo: data.validation)"
    return [mistake("artifacts.best_metric", named, problem)]


def settle_kept(kind: str, artifacts: ArtifactSpec) -> list[dict[str, Any]]:
    """A job that trains nothing has no checkpoints."""
    if kind not in ("inference", "eval", "tinker"):
        return []
    by = f"kind = {kind!r}" + (", whose clients save" if kind == "tinker" else ": nothing is trained")
    ignored = unused(artifacts, ArtifactSpec(), {"keep_last", "keep_all", "keep_best"}, by)
    return [{**one, "field": f"artifacts.{one['field']}"} for one in ignored]
