"""Sweeps and their trials, as Redis holds them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from opentinker.shared.types.core import MAX_TAGS

TABLE = "sweep"
"""Name of a sweep's table, and value of `kind` in its document."""
ID_PREFIX = "s-"
"""Beginning of a sweep's id."""
MAX_SWEEP_TAGS = MAX_TAGS - 1
"""Its jobs have its id among their tags as well."""


def is_sweep(data: Any) -> bool:
    """Return whether a document describes a sweep: it has a table [sweep], or `kind = "sweep"`."""
    return isinstance(data, dict) and (data.get(TABLE) is not None or data.get("kind") == TABLE)


class SweepState(StrEnum):
    """running -> succeeded | failed | cancelled."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Every trial has ended, or the budget is spent."""
    FAILED = "failed"
    """No trial has a value, or it could not go on."""
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """running -> finished | stopped | failed | cancelled."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Early, because it did worse than others."""
    FAILED = "failed"
    """A job of it failed, was refused, or reported no value."""
    CANCELLED = "cancelled"
    """By request, or because the budget was spent."""


class TrialJob(msgspec.Struct, kw_only=True):
    """A job of a trial."""

    id: str = ""
    """Empty until it is submitted."""
    seed: int | None = None
    state: str = ""
    """That of the job when it was last looked at."""
    over: bool = False
    """Whether it has ended and its metrics were read to the end."""
    step: int = 0
    """Newest step with the sweep's metric."""
    value: float | None = None
    """Summary of the metric so far."""
    rungs: dict[int, float] = {}
    """The moving mean of the metric at the steps of early stopping that it has passed."""


class Trial(msgspec.Struct, kw_only=True):
    """One combination of values, and its jobs: one, or one for each seed."""

    number: int
    settings: dict[str, Any]
    """Values by path."""
    jobs: list[TrialJob]
    state: TrialState = TrialState.RUNNING
    reason: str = ""
    value: float | None = None
    """Mean over its jobs; None until all have one."""
    judged: int = 0
    """Last step at which the rule of early stopping looked at it."""
    created: float = 0.0
    finished: float = 0.0

    @property
    def open_jobs(self) -> list[TrialJob]:
        return [job for job in self.jobs if not job.over]

    @property
    def step(self) -> int:
        """Return the step that all its jobs have reached."""
        return min(job.step for job in self.jobs)


class SweepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a sweep; written with its trials."""

    jobs: int = 0
    """Jobs that were submitted."""
    states: dict[str, int] = {}
    """Trials by state."""
    best: int | None = None
    """Number of the finished trial with the best value."""
    value: float | None = None
    """Its value."""
    settings: dict[str, Any] = {}
    """Its settings."""
    importance: dict[str, float] = {}
    """By path: how much of the difference between good and ordinary trials a setting explains."""


class SweepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep, as lists show it."""

    id: str
    tenant: str
    name: str
    project: str = ""
    tags: list[str] = []
    notes: str = ""
    kind: str
    """Kind of its jobs."""
    model: str = ""
    """That of its jobs; empty if it is varied."""
    environment: str = ""
    """That of its jobs; empty if they have none, or if it is varied."""
    state: SweepState
    reason: str = ""
    created: float
    updated: float
    finished: float = 0.0
    key: str = ""
    """Id of the API key, or name of the user, that submitted it."""
    method: str
    metric: str
    goal: str
    planned: int = 0
    """Trials that there will be at most."""
    progress: SweepProgress = SweepProgress()


class Undelivered(msgspec.Struct, frozen=True, kw_only=True):
    """A message of [[notify]] that was given up."""

    time: float
    occasion: str
    entry: int
    """Place in its `notify`."""
    tries: int
    error: str


class SweepRecord(SweepSummary, frozen=True, kw_only=True):
    """A sweep, whole."""

    trace: str = ""
    """`traceparent` of the request that submitted it."""
    table: dict[str, Any]
    """[sweep] with its defaults."""
    base: dict[str, Any]
    """Spec of its jobs, as it was submitted: later changes of labels are in the fields above."""
    uses: list[str] = []
    """Versions of uploaded environments and checkpoints that its jobs name, as they were found at its submission."""
    undelivered: list[Undelivered] = []
