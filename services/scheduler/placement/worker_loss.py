"""Decides what the loss of a worker means for its job: retry now, retry later, or failure.

Only losses that the job itself may have caused count towards its failure. A trainer's loss does not count if it made a
step after loading, unless the previous trainer was lost at the same step. A loss never counts if
- the worker was told to stop;
- its lease is older than this scheduler's leadership: both may have ended together, or while no scheduler was leading;
- the scheduler has no connection to NATS, or has just regained it: the outage may have ended the worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from opentinker.services.scheduler.placement.cluster_view import MAX_RETRY_S
from opentinker.shared.backoff import exponential_delay_s
from opentinker.shared.types.core import JobRecord, Lease, Pool

MAX_RESTARTS = 5
"""Losses of trainers in a row that count; the next one fails the job. As many rollout workers, and one for each that
the job asks for beyond the first, may be lost before one serves it."""
NATS_AWAY = "NATS was away"


class Loss(NamedTuple):
    """`failed`: the reason to fail the job, or empty. Else `changes` are of its record, `detail` of the event."""

    event: str
    failed: str
    changes: dict[str, Any]
    detail: dict[str, Any]


def lost(job: JobRecord, lease: Lease, why: str, *, counts: bool, now: float, retry_s: float) -> Loss:
    """`counts`: the worker was not told to stop, this scheduler has leased it, and NATS was there. `retry_s`: pause
    after the second loss in a row; doubled with each."""
    return (_trainer if lease.pool == Pool.TRAINER else _rollout_worker)(job, lease, why, counts, now, retry_s)


def _trainer(job: JobRecord, lease: Lease, why: str, counts: bool, now: float, retry_s: float) -> Loss:
    stepped = 0 <= job.resumed_step < job.step
    if not counts:
        restarts = job.restarts
    elif stepped and job.step != job.restart_step:
        restarts = 1
    else:
        restarts = job.restarts + 1
    failed = ""
    if restarts > MAX_RESTARTS:
        failed = (
            f"the trainer was lost {restarts} times in a row without a new step (step {job.step} of {job.steps}); "
            f"the last one was {lease.worker}: {why}. See the trainer's log"
        )
    again = _again(restarts if counts else 0, now, retry_s)
    restart_step = job.step if counts else job.restart_step
    changes = {"restarts": restarts, "restart_step": restart_step, "resumed_step": -1, **again}
    detail = {"worker": lease.worker, "why": why, "step": job.step, "restarts": restarts}
    if len(lease.group) > 1:
        detail["group"] = ", ".join(share.worker for share in lease.group)
    return Loss("trainer_lost", failed, changes, detail)


def _rollout_worker(job: JobRecord, lease: Lease, why: str, counts: bool, now: float, retry_s: float) -> Loss:
    """Count a rollout worker's loss: a job whose model kills every process that loads it must fail eventually."""
    losses = job.rollout_losses + counts
    failed = ""
    if counts and losses >= MAX_RESTARTS + job.spec["resources"]["rollout_workers"]:
        failed = (
            f"rollout workers were lost {losses} times in a row before one served the job; the last one was "
            f"{lease.worker}: {why}. See its log. If nothing is said there it was killed, most often for want of "
            "memory: take a smaller model or a shorter rollout.context_length, or a machine with more memory"
        )
    changes = {"rollout_losses": losses, **_again(losses if counts else 0, now, retry_s)}
    return Loss("rollout_worker_lost", failed, changes, {"worker": lease.worker, "why": why})


def _again(losses: int, now: float, retry_s: float) -> dict[str, Any]:
    """Schedule the next try after this many losses in a row: immediately after the first."""
    pause_s = exponential_delay_s(losses - 1, retry_s, MAX_RETRY_S) if losses > 1 else 0.0
    return {"lost_at": now, "retry_at": now + pause_s}
