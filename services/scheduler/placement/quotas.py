"""Limits of a tenant in the cluster, and its usage today. Pure values: `planner.py` applies them."""

from __future__ import annotations

import msgspec

from opentinker.shared.tenant_limits import TenantLimits

GB = 10**9


class Used(msgspec.Struct, frozen=True):
    """Seconds since midnight UTC, counted from leases (shared/state/usage.py), and what is stored now."""

    worker_s: float = 0.0
    gpu_s: float = 0.0
    stored: int = 0
    """Bytes."""
    largest: tuple[tuple[str, int], ...] = ()
    """Jobs with the most stored bytes: id, bytes."""


def used_up(limits: TenantLimits, used: Used) -> str:
    """Describe why no job of the tenant may continue today; empty if jobs may."""
    for name, seconds, most in (
        ("worker", used.worker_s, limits.worker_seconds_per_day),
        ("GPU", used.gpu_s, limits.gpu_seconds_per_day),
    ):
        if most is not None and seconds >= most:
            return f"its tenant's quota of {most:g} {name} seconds a day, which is open again at midnight UTC"
    return ""


def over_quota(limits: TenantLimits, used: Used, *, jobs: int, workers: int, more: int) -> str:
    """Describe why a tenant with this many running jobs and workers may not start a job of `more` workers."""
    if limits.running_jobs is not None and jobs >= limits.running_jobs:
        return f"its tenant's quota of {limits.running_jobs} running jobs"
    if limits.workers is not None and workers + more > limits.workers:
        return f"its tenant's quota of {limits.workers} workers"
    if why := used_up(limits, used):
        return why
    if limits.stored_gb is not None and used.stored >= limits.stored_gb * GB:
        largest = ", ".join(f"{job} {size / GB:.3g} GB" for job, size in used.largest)
        return (
            f"its tenant's quota of {limits.stored_gb:g} GB of artifacts: {used.stored / GB:.3g} GB are stored; delete "
            f"some with `opentinker delete JOB --all` (the largest: {largest})"
        )
    return ""
