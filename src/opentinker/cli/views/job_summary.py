"""Describes a job's state, and what it waits for and why, in sentences from the server's data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentinker.cli.common import rough
from opentinker.sdk.job_text import on_one_line
from opentinker.shared.types.core import JobState, part_id
from opentinker.shared.types.errors import plural

Job = Mapping[str, Any]

LONG_WAIT = 0.5
"""Share of its time that a trainer waits from which generation is what limits the job."""
SHORT_WAIT = 0.1
FRESH_S = 120.0
"""Metrics older than this say nothing about now."""


def doing(job: Job, now: float | None = None) -> list[str]:
    """`job`: an answer of GET /v1/jobs/{id}."""
    now = time.time() if now is None else now
    state = JobState(job["state"])
    if state.final:
        return _ended(job)
    said = [_state(job, now)]
    if job.get("waiting_for"):
        said.append(f"It waits for {job['waiting_for']}.")
    said += [_worker(worker) for worker in job.get("workers", [])]
    if state == JobState.RUNNING and job["kind"] == "rl":
        said += _flow(job, now)
    if job.get("restarts"):
        said.append(f"Its trainer was lost {plural(job['restarts'], 'time')} in a row.")
    return said


def _ended(job: Job) -> list[str]:
    unit = "episode" if job["kind"] == "eval" else "step"
    after = f" after {job['step']} of {plural(job['steps'], unit)}" if job["steps"] else ""
    reason = on_one_line(job["reason"]).rstrip(".")
    ended = "was cancelled" if job["state"] == JobState.CANCELLED else str(job["state"])
    return [f"It {ended}{after}" + (f": {reason}" if reason else "") + "."]


def _state(job: Job, now: float) -> str:
    since, plays = rough(now - float(job["created"])), job["kind"] == "eval"
    match JobState(job["state"]):
        case JobState.QUEUED if job["step"]:
            on = (
                f"after {job['step']} episodes" if plays else f"from its last checkpoint (it was at step {job['step']})"
            )
            return f"It is in the queue again, and continues {on}."
        case JobState.QUEUED:
            return f"It is in the queue, for {since} now."
        case JobState.STARTING:
            return f"It is starting: its workers load the model (submitted {since} ago)."
        case JobState.RUNNING:
            return _runs(job)
        case other:
            return f"It is {other}."


def _runs(job: Job) -> str:
    if job["kind"] == "inference":
        return f"It answers requests at {job.get('endpoint', '')}."
    if job["kind"] == "tinker":
        return "It serves clients of the Tinker API at this server's address."
    if job["kind"] == "eval":
        return f"It plays: {job['step']} of {job['steps']} episodes have ended."
    return f"It is running: step {job['step']} of {job['steps'] or 'an unknown number'}."


def _worker(worker: dict[str, Any]) -> str:
    does = {"loading": "loads the model", "ready": "works", "draining": "finishes what it has begun", "idle": "is idle"}
    return f"{worker['id']} on {worker['host']} {does.get(worker['status'], worker['status'])}."


def _flow(job: Job, now: float) -> list[str]:
    said = []
    for policy in job.get("policies") or ("",):
        said += _policy_flow(job, policy, now)
    return said


def _policy_flow(job: Job, policy: str, now: float) -> list[str]:
    """Describe the groups and the trainer of one policy, or of the job that has one."""
    ledger = job["policies"][policy]["ledger"] if policy else job["ledger"]
    said = [
        f"{policy + ': ' if policy else ''}{ledger['running']} groups are being generated, {ledger['pending']} wait to "
        f"be trained, {ledger['trained']} were trained."
    ]
    discarded, failed = sum(ledger["discarded"].values()), sum(ledger["failed"].values())
    if discarded or failed:
        why = ", ".join(
            f"{count} {name}" for name, count in {**ledger["discarded"], **ledger["failed"]}.items() if count
        )
        said.append(f"{plural(discarded + failed, 'group')} discarded or failed, and replaced: {why}.")
    point = job["metrics"].get(part_id("trainer", policy))
    if point is None or now - point["time"] > FRESH_S:
        last = "no step yet" if point is None else f"the last step was {rough(now - point['time'])} ago"
        return [*said, f"The trainer waits for its next batch: {last}."]
    share = point["values"].get(f"{policy}/trainer/wait_share" if policy else "trainer/wait_share")
    if share is not None and share >= LONG_WAIT:
        said.append(f"The trainer waits {share:.0%} of its time for trajectories: more rollout workers would help.")
    elif share is not None and share <= SHORT_WAIT and not ledger["running"]:
        said.append(
            "Generation waits for the trainer: algorithm.max_staleness lets no group begin before the next version."
        )
    elif share is not None:
        said.append(f"The trainer waits {share:.0%} of its time for trajectories.")
    return said


def next_commands(job: Job) -> list[tuple[str, ...]]:
    """Return the next commands to type, as arguments of `opentinker`, the likeliest first."""
    id, state = str(job["id"]), JobState(job["state"])
    if state == JobState.FAILED:
        return [("logs", id, "--level", "warning"), ("events", id)]
    if job["kind"] == "eval" and state.final:
        return [("transcripts", id)]
    if state.final:
        policy = ("--policy", next(iter(job["policies"]))) if job.get("policies") else ()
        return [("download", id, "my-model", *policy), ("watch", id)]
    if state == JobState.PAUSED:
        return [("resume", id), ("cancel", id)]
    if job.get("waiting_for"):
        return [("status",), ("events", id, "-f")]
    return [("watch", id), ("logs", id, "-f")]
