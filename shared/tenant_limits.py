"""Limits of one tenant in the cluster, part of the settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MIN_PRIORITY, MAX_PRIORITY = -10, 10
"""Bounds of resources.priority."""


class TenantLimits(BaseModel):
    """Limits of one tenant in the cluster; unset ones do not limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Weight of its fair share: with weight 2 it gets twice the workers of a tenant with 1 while both have jobs
    waiting."""
    running_jobs: Annotated[int, Field(ge=0)] | None = None
    """Jobs that are starting or running at a time."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Trainers and rollout workers that its jobs hold at a time."""
    worker_seconds_per_day: Annotated[float, Field(ge=0)] | None = None
    """Sum over all its workers since midnight UTC. When it is used up no job starts, and running jobs save what they
    have trained and wait for the next day."""
    gpu_seconds_per_day: Annotated[float, Field(ge=0)] | None = None
    """The same, of each worker times the GPUs that it says it has."""
    stored_gb: Annotated[float, Field(ge=0)] | None = None
    """Size of its jobs' artifacts in the store, in GB (10^9 bytes). When it is full no job starts; running jobs
    continue."""
    max_priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = MAX_PRIORITY
    """resources.priority of its jobs may be at most this."""

    @property
    def by_time(self) -> bool:
        return self.worker_seconds_per_day is not None or self.gpu_seconds_per_day is not None
