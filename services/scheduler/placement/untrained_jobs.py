"""State transitions of inference and eval jobs, which have no trainer to report them, and of jobs that serve the
Tinker API, whose trainer reports steps alone.

starting -> running     a rollout worker is ready
running -> queued       inference: idle for `serving.sleep_s`, or for `inference_lend_s` while another job waits for its
                        workers (planner.py); it sleeps, and placement leaves it alone until a request has woken it
                        (router.py); its workers answer what they have begun
starting -> queued      inference: the job whose live policy it would serve has lost its workers
any -> succeeded        inference: idle for `serving.idle_s`
"""

from __future__ import annotations

import time
from collections.abc import Container

import structlog

from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord, JobState

log = structlog.get_logger()

UNTRAINED = ("inference", "eval", "tinker")
SLEEPS = "a request: it sleeps, and the next one wakes it (serving.sleep_s)"
LENT = "a request: idle, it lent its rollout workers to {}, and the next request wakes it"


async def update_untrained(
    store: Store, job: JobRecord, cluster: Cluster, active: Container[str], leader: int = UNFENCED
) -> bool:
    """Update one job of these kinds. True if it shall sleep. Raises Conflict or NotFound if it has ended in between,
    Fenced if another scheduler leads than `leader`.

    `active`: jobs that are not over.
    """
    if (followed := followed_by(job)) and followed not in active:
        over = (await store.job(followed)).state
        reason = f"job {followed}, whose live policy it served, has {over}; {followed}@latest is its newest checkpoint"
        await store.transition(job.id, JobState.SUCCEEDED, allowed=[job.state], leader=leader, reason=reason)
        log.info("followed_job_ended", job=job.id, followed=followed)
        return False
    if job.state == JobState.STARTING and cluster.serving(job.id):
        await store.transition(job.id, JobState.RUNNING, allowed=[JobState.STARTING], leader=leader)
        log.info("job_serving", job=job.id)
    if job.kind != "inference":
        return False
    quiet_s, serving = _quiet_s(job, cluster), job.spec["serving"]
    idle_s, sleep_s = serving["idle_s"], serving.get("sleep_s")
    if quiet_s is not None and idle_s is not None and quiet_s >= idle_s:
        if job.asleep and not (await store.job(job.id)).asleep:
            return False  # a request has just woken it
        reason = f"idle for {idle_s:g} s (serving.idle_s)"
        await store.transition(job.id, JobState.SUCCEEDED, allowed=[job.state], leader=leader, reason=reason)
        log.info("job_idle", job=job.id, idle_s=idle_s)
        return False
    return quiet_s is not None and sleep_s is not None and not job.asleep and quiet_s >= sleep_s


def followed_by(job: JobRecord) -> str:
    """The job whose live policy this one serves, if it does."""
    id, _, which = str((job.spec.get("start") or {}).get("from", "")).partition("@")
    return id if which == "live" else ""


def waits_for_source(job: JobRecord, held: Container[str]) -> bool:
    """Return whether the job waits to serve the live policy of a job that is not among `held`, those with workers. One
    that already serves continues with what it has."""
    source = followed_by(job)
    return bool(source) and source not in held and not job.asleep and job.state != JobState.RUNNING


def _quiet_s(job: JobRecord, cluster: Cluster) -> float | None:
    """Seconds without a request, at least; None if that is not known now."""
    if job.asleep:
        return time.time() - (job.quiet_since or job.since)
    return cluster.quiet_s(job.id) if job.state == JobState.RUNNING else None
