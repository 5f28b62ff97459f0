"""Jobs while messages are too small for a group, the disk is full, or a rollout worker comes late and dies."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from tests.conftest import WAIT_S, until
from tests.e2e.toy_jobs import free, job_spec, slow_spec, steps_of
from tests.support.cluster import SERVERS, toy_cluster


async def test_group_too_large_for_a_message_fails_the_job_with_the_numbers(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path, nats={"max_payload": "16KB"}) as (cluster, model):
        job = await cluster.submit(job_spec(model, algorithm={"group_size": 100, "groups_per_batch": 4}))
        reason = await cluster.fails(job)
        for words in ("algorithm.group_size is 100", "rollout.context_length is 4096", "limit 16384", "max_payload"):
            assert words in reason, reason
        await free(cluster)
        assert cluster.processes["rollout_worker-0"].exits == []


@pytest.mark.nightly
async def test_job_goes_on_while_the_disk_takes_nothing(tmp_path: Path) -> None:
    """No log line, no metrics and no checkpoint can be written for a while: nothing ends, and only time is lost."""
    async with toy_cluster(tmp_path) as (cluster, model):
        train = {"learner": "simulated", "steps": 60, "simulated_step_s": 0.08, "checkpoint_every": 4}
        spec = job_spec(model, train=train)
        job = await cluster.submit(spec)
        await until(lambda: steps_of(cluster, job))
        trainer = cluster.processes["trainer-0"].pid
        _, hard = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (64, hard))  # bytes per file
        last = steps_of(cluster, job)[-1]  # or the next one, if it was being put in place
        await cluster.reaches(job, last + 16)
        refused = {event["event"] for event in await cluster.client.event_log(job)}
        assert {"checkpoint_failed", "metrics_log_failed"} <= refused
        assert steps_of(cluster, job)[-1] <= last + 4
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (hard, hard))
        await cluster.succeeds(job)
        assert cluster.faults(job, spec) == [], "no line of metrics.jsonl is missing"
        assert cluster.processes["trainer-0"].exits == []


@pytest.mark.nightly
async def test_rollout_worker_joins_late_and_may_die_during_a_swap(tmp_path: Path) -> None:
    patient = {"swap_timeout_s": 3 * WAIT_S, "worker_ttl_s": 3 * WAIT_S}  # nobody shall wait for these
    async with toy_cluster(tmp_path, **patient) as (cluster, model):
        toy = {"seconds_per_token": 0.01, "swap_seconds": 0.4}
        spec = slow_spec(
            model, rollout={"engine": "toy", "max_tokens": 8, "toy": toy}, resources={"rollout_workers": 2}
        )
        job = await cluster.submit(spec)
        await cluster.reaches(job, 3)
        joined = cluster.add("rollout_worker")

        def both_serve() -> bool:
            lines = cluster.lines(job)
            return bool(lines) and lines[-1]["rollout_workers"] == 2

        await until(both_serve)
        version = len(cluster.lines(job))
        await until(
            lambda: cluster.client.metrics(job, source=joined, names=["rollout/groups"]),
            lambda points: any(p["values"]["rollout/groups"] > 0 and p["step"] >= version - 1 for p in points),
        )

        await cluster.reaches(job, await cluster.step(job) + 1)  # its weights are on their way now
        step, killed = await cluster.step(job), time.monotonic()
        cluster.kill(joined)
        await cluster.reaches(job, step + 3)
        print(f"three steps further {time.monotonic() - killed:.2f} s after the kill")
        await until(lambda: both_serve() and len(cluster.processes[joined].exits) == 1)  # it came back
        await cluster.client.cancel(job)
        ledger = await cluster.ledger(job)
        assert ledger.balanced and ledger.failed == {}
        assert max(line["staleness/max"] for line in cluster.lines(job)) <= 2
        assert all(not p.exits for name, p in cluster.processes.items() if name not in (*SERVERS, joined))
