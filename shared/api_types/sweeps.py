"""Sweeps and their trials."""

from typing import Any, Literal, TypedDict


class SweepTrialJob(TypedDict):
    """A job of a trial."""

    id: str
    """Empty until it is submitted."""
    seed: int | None
    """One of sweep.seeds; null without them."""
    state: str
    """State of the job when the scheduler looked last; empty until it is submitted."""
    step: int
    """Newest step with the sweep's metric."""
    value: float | None
    """Summary of the metric so far; null before the first value."""


class SweepTrial(TypedDict):
    """One combination of values."""

    number: int
    settings: dict[str, Any]
    """Values by path."""
    state: Literal["running", "finished", "stopped", "failed", "cancelled"]
    """stopped: early, because it did worse than others."""
    reason: str
    """Why it was stopped, failed or was cancelled; while it runs, why its job is refused for now."""
    value: float | None
    """Mean over its jobs; null while one of them has none."""
    created: float
    finished: float | None
    jobs: list[SweepTrialJob]


class SweepBest(TypedDict):
    """The finished trial with the best value."""

    number: int
    value: float
    settings: dict[str, Any]


class SweepSummary(TypedDict):
    """A sweep, as lists have it."""

    id: str
    """Also a tag of its jobs."""
    name: str
    project: str
    """Empty if it has none."""
    tags: list[str]
    notes: str
    kind: str
    """Kind of its jobs."""
    model: str
    """Base model of its jobs; empty if it is varied."""
    environment: str
    """Environment of its jobs; empty if they have none, or if it is varied."""
    tenant: str
    key: str
    """Id of the API key, or name of the user, that submitted it."""
    state: Literal["running", "succeeded", "failed", "cancelled"]
    reason: str
    method: Literal["grid", "random", "tpe"]
    metric: str
    goal: Literal["maximize", "minimize"]
    created: float
    updated: float
    finished: float | None
    """Null while it runs."""
    planned: int
    """Trials that there will be at most."""
    trials: dict[str, int]
    """Trials that there are, by state."""
    jobs: int
    """Jobs that were submitted."""
    best: SweepBest | None
    """Null while no trial has finished."""


class SweepUndelivered(TypedDict):
    """A message of [[notify]] that was given up."""

    time: float
    occasion: str
    entry: int
    """Place in `notify`."""
    tries: int
    error: str
    """Of the last try."""


class Sweep(SweepSummary):
    """One sweep."""

    spec: dict[str, Any]
    """As it was submitted, with the defaults of [sweep]."""
    all_trials: list[SweepTrial]
    """By number."""
    importance: dict[str, float]
    """By path: how much of the difference between good and ordinary trials a setting explains, 1 in all; empty with few
    finished trials, and where a single setting varies."""
    worker_s: float
    """Seconds of workers that its jobs have cost."""
    undelivered: list[SweepUndelivered]
    """Messages about the sweep that were given up, oldest first."""


class Sweeps(TypedDict):
    """A page of them."""

    sweeps: list[SweepSummary]
    cursor: str
    """`before` of the next page."""
    more: bool


class SweepGroup(TypedDict):
    """Sweeps that have a property in common."""

    name: str
    """The project, tag, state or other value; empty for sweeps without one."""
    sweeps: int
    states: dict[str, int]
    """Sweeps by state."""


class SweepGroups(TypedDict):
    """Sweeps counted by a property, the largest group first."""

    groups: list[SweepGroup]


class DeletedSweep(TypedDict):
    """A sweep that was deleted."""

    sweep: str
    jobs: list[str]
    """Jobs whose artifacts were deleted with it."""
    bytes: int
