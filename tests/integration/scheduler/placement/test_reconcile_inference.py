"""Inference jobs that sleep, lend their workers or follow another job."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.integration.scheduler.placement.reconciling import (
    reconciled,
    started,
    state,
    waits_for,
)
from tests.support.scheduling import Workers, new_job


async def endpoint(store: Store, id: str, **changes: Any) -> str:
    """A queued inference job."""
    spec = parse_spec({"name": "chat", "kind": "inference", "model": {"base": "m"}, **changes})
    await store.create_job(id=id, spec=spec.model_dump(mode="json"), tenant="default")
    return id


async def test_a_job_answers_open_requests_before_sleep(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler = Reconciler(ctx)
    job = await endpoint(store, "j-sleepy0000", serving={"sleep_s": 5.0})
    await workers.start("rollout-0")
    await reconciler.reconcile()
    worker = workers["rollout-0"]
    worker.leaves = False  # a request has come since it said so
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": 60.0})
    await reconciled(reconciler, partial(store.job, job), lambda record: record.asleep)
    await reconciler.reconcile()
    lease = await worker.lease()
    assert lease is not None and lease.leaves_by > time.time()
    assert await state(store, job) == JobState.QUEUED
    worker.leaves = True
    await reconciled(reconciler, worker.lease, lambda lease: lease is None)
    assert (await store.job(job)).asleep


async def test_an_idle_inference_job_lends_its_worker(store: Store, workers: Workers, ctx: Context) -> None:
    """On a server with one rollout worker an endpoint that nobody uses starves no other job."""
    reconciler = Reconciler(ctx)
    chat = await endpoint(store, "j-idle000000")
    await workers.start("rollout-0", "trainer-0")
    worker = workers["rollout-0"]
    await reconciled(reconciler, partial(state, store, chat), lambda found: found == JobState.RUNNING)
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": ctx.settings.inference_lend_s - 1.0})
    rl = await new_job(store, "j-rl")
    await store.update(rl, since=time.time() - ctx.settings.queue_preempt_after_s)
    await store.update(chat, since=time.time() - ctx.settings.queue_min_run_s)
    await reconciled(reconciler, partial(store.job, rl), lambda job: "held by inference job" in job.waiting_for)
    assert await state(store, chat) == JobState.RUNNING
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": ctx.settings.inference_lend_s})
    await reconciled(reconciler, partial(store.job, rl), lambda job: job.state in (JobState.STARTING, JobState.RUNNING))
    asleep = await store.job(chat)
    assert asleep.asleep and asleep.waiting_for == (
        f"a request: idle, it lent its rollout workers to {rl}, and the next request wakes it"
    )
    assert asleep.since - asleep.quiet_since == pytest.approx(ctx.settings.inference_lend_s)
    assert (await store.latest_event(chat, "asleep") or {})["lent_to"] == rl


async def test_a_following_job_leaves_the_other_its_workers(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler = Reconciler(ctx)
    follower = await endpoint(store, "j-follower00", start={"from": "j-source0000@live"})
    source = await new_job(store, "j-source0000", JobState.PAUSED)
    await workers.start("trainer-0", "rollout-0")
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.QUEUED
    assert await waits_for(store, follower, f"job {source} to run")
    await store.transition(source, JobState.QUEUED)
    await reconciler.reconcile()
    assert await started(store, source, epoch=2)
    await workers.start("rollout-1")
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.STARTING
    await store.transition(source, JobState.PAUSED)
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.QUEUED and await workers.holds("rollout-1") is None
