"""An environment that is down is tried by single groups until it is back, and then its jobs go on."""

from __future__ import annotations

import time

import pytest

from opentinker.services.scheduler.jobs.tickets import TicketIssuer
from opentinker.shared.messaging.subjects import TICKET
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.circuits import DOWN, FIRST_WAIT_S, MAX_WAIT_S, OPENS_AFTER, Circuits, circuit_key
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, JobState
from tests.support.scheduling import kinds, new_job

NOW = 1000.0
BATCH = 4


async def opened(store: Store, key: str, now: float) -> None:
    await Circuits(store.redis).succeeded(key)
    for number in range(OPENS_AFTER):
        assert await Circuits(store.redis).failed(key, Ending.ENV_LOST, "gone", now) is (number == OPENS_AFTER - 1)


async def test_failures_in_a_row_open_the_circuit_and_a_success_closes_it(store: Store) -> None:
    found, key = Circuits(store.redis), circuit_key("t", {"name": "remote", "config": {"url": "x"}})
    await found.succeeded(key)
    for _ in range(OPENS_AFTER - 1):
        assert not await found.failed(key, Ending.ENV_TIMEOUT, "slow", NOW)
    await found.succeeded(key)
    assert not (await found.find(key)).is_open
    await opened(store, key, NOW)
    seen = await found.find(key)
    assert (seen.opened, seen.error, seen.retry_at) == (NOW, "gone", NOW + FIRST_WAIT_S)
    waits = []
    for _ in range(9):
        await found.tried(key, NOW)
        assert await found.failed(key, Ending.ENV_LOST, "still gone", NOW + 1), "it stays open"
        waits.append((await found.find(key)).retry_at - NOW)
    assert waits[:3] == [2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, 8 * FIRST_WAIT_S] and waits[-1] == MAX_WAIT_S
    assert (await found.find(key)).error == "still gone"
    await found.succeeded(key)
    assert not (await found.find(key)).is_open
    await found.tried(key, NOW)
    assert not (await found.find(key)).is_open


async def test_an_environment_that_is_lost_after_opening_is_down_too(store: Store) -> None:
    found, key = Circuits(store.redis), circuit_key("t", {"name": "remote", "config": {"url": "y"}})
    await found.succeeded(key)
    assert not any([await found.failed(key, Ending.ENV_ERROR, "x", NOW, opened_at=NOW) for _ in range(OPENS_AFTER)])
    lost = [await found.failed(key, Ending.ENV_LOST, "gone", NOW, opened_at=NOW - 1) for _ in range(OPENS_AFTER)]
    assert lost == [False] * (OPENS_AFTER - 1) + [True]


async def test_a_trial_that_fails_after_opening_closes_the_circuit(store: Store) -> None:
    found, key = Circuits(store.redis), circuit_key("t", {"name": "remote", "config": {"url": "z"}})
    await opened(store, key, NOW)
    assert await found.failed(key, Ending.ENV_TIMEOUT, "slow", NOW + 1, opened_at=NOW - 1), "it had begun before"
    assert not await found.failed(key, Ending.TIMEOUT, "slow", NOW + 1, opened_at=NOW - 1)
    assert (await found.find(key)).is_open
    assert not await found.failed(key, Ending.ENV_ERROR, "a bug that the policy found", NOW + 9, opened_at=NOW + 8)
    assert not (await found.find(key)).is_open


@pytest.mark.parametrize("ending", [Ending.ENV_ERROR, Ending.ENV_TIMEOUT, Ending.ENV_LOST])
async def test_an_environment_is_down_only_if_it_has_worked(store: Store, ending: Ending) -> None:
    found, key = Circuits(store.redis), circuit_key("t", {"name": "mine", "config": {"how": ending}})
    assert not any([await found.failed(key, ending, "bug", NOW) for _ in range(3 * OPENS_AFTER)])
    await found.succeeded(key)
    assert [await found.failed(key, ending, "x", NOW) for _ in range(OPENS_AFTER)][-1]


async def test_other_failures_and_other_tenants_and_configs_open_nothing(store: Store) -> None:
    found, key = Circuits(store.redis), circuit_key("t", {"name": "mine", "config": {}})
    await opened(store, key, NOW)
    other = circuit_key("t", {"name": "mine", "config": {"url": "other"}})
    await found.succeeded(other)
    assert not (await found.find(other)).is_open and key != circuit_key("u", {"name": "mine", "config": {}})
    for ending in (Ending.ENGINE_ERROR, Ending.PROMPT, Ending.ENV_BAD_REPLY):
        assert not any([await found.failed(other, ending, "", NOW) for _ in range(2 * OPENS_AFTER)]), ending


async def test_a_job_of_it_gets_one_ticket_at_a_time_is_told_and_goes_on(ctx: Context, store: Store) -> None:
    job = await new_job(store, "j-outage", JobState.RUNNING, environment__name="copy_digits")
    record = await store.job(job)
    key, found = circuit_key(record.tenant, record.spec["environment"]), Circuits(store.redis)
    admission = Admission(store.redis, job, 1)
    await admission.restore(step=0, max_staleness=0, groups_per_batch=BATCH, total=100, discarded={})
    await opened(store, key, time.time())
    for issuer in (TicketIssuer(ctx), TicketIssuer(ctx)):  # another scheduler tells nothing twice
        await issuer.issue()
    assert await ctx.bus.stored(TICKET, job=job) == [] and (await kinds(store, job)).count("environment_down") == 1
    await found.tried(key, 0.0)
    for _ in range(3):
        await issuer.issue()
    assert len(await admission.running()) == 1, "one for trial, and the next one waits"
    await found.tried(key, 0.0)
    await issuer.issue()
    assert len(await admission.running()) == 2
    for seq in await admission.running():
        await admission.fail(seq, DOWN)
    await found.succeeded(key)
    await issuer.issue()
    assert len(await admission.running()) == BATCH and (await kinds(store, job))[-1] == "environment_up"


async def test_groups_that_failed_meanwhile_do_not_end_the_job_but_too_long_an_outage_does(
    ctx: Context, store: Store
) -> None:
    job = await new_job(store, "j-long", JobState.RUNNING, rollout__max_env_down_s=60.0)
    record = await store.job(job)
    key = circuit_key(record.tenant, record.spec["environment"])
    admission, issuer = Admission(store.redis, job, 1), TicketIssuer(ctx)
    await admission.restore(step=0, max_staleness=0, groups_per_batch=BATCH, total=100, discarded={})
    for _ in range(10):
        await issuer.issue()
        for seq in await admission.running():
            await admission.fail(seq, DOWN)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.RUNNING
    await opened(store, key, time.time() - 50.0)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.RUNNING
    await Circuits(store.redis).succeeded(key)
    await opened(store, key, time.time() - 61.0)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.RUNNING, "what failed before it started may work again"
    await store.update(job, since=time.time() - 61.0)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.RUNNING, "no group has failed since"
    await Circuits(store.redis).failed(key, Ending.ENV_LOST, "gone", time.time())
    await issuer.issue()
    record = await store.job(job)
    assert record.state == JobState.FAILED
    assert (
        "is down since" in record.reason
        and "longer than rollout.max_env_down_s = 60; last error: gone" in record.reason
    )
