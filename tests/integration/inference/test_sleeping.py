"""Inference jobs that give their workers back when nobody asks, and wake with the next request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import openai
import pytest

from opentinker.services.scheduler.inference.router import refuse_unless_served
from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.untrained_jobs import update_untrained
from opentinker.shared.openai.fields import InvalidField
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Fenced
from tests.conftest import WAIT_S, until
from tests.support.factories import refusals
from tests.support.inference import HELLO, Site
from tests.support.scheduling import kinds


async def made(site: Site, store: Store, **serving: Any) -> str:
    """A job that has run; it may sleep by now."""
    model = {"base": "some/model", "tool_format": "hermes"}
    job = await site.client.submit({"name": "chat", "kind": "inference", "model": model, "serving": serving})
    await ran(store, job["id"], 1)
    return str(job["id"])


async def ran(store: Store, job: str, times: int) -> None:
    await until(lambda: kinds(store, job), lambda found: found.count("running") >= times)


async def asleep(site: Site, job: str) -> None:
    """And its worker is free."""
    await until(lambda: site.client.job(job), lambda record: bool(record["asleep"]) and record["workers"] == [])


async def test_an_idle_job_sleeps_and_wakes_with_the_next_request(site: Site, store: Store) -> None:
    job = await made(site, store, sleep_s=0.2, wake_s=WAIT_S)
    await asleep(site, job)
    record = await site.client.job(job)
    assert (record["state"], record["waiting_for"][:9]) == ("queued", "a request")
    other = await site.job()  # gets the worker meanwhile
    async with site.openai(job) as model:
        assert [card.id async for card in await model.models.list()] == ["some/model", "chat", job]
        asking = [asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO)) for _ in range(3)]
        await until(
            lambda: site.client.job(job),
            lambda record: not record["asleep"] and "a free rollout worker (held by" in record["waiting_for"],
        )
        await site.client.cancel(other)
        answers = await asyncio.gather(*asking)
    assert {answer.choices[0].message.content for answer in answers} == {"Hello there."}
    await asleep(site, job)  # again
    seen = [kind for kind in await kinds(store, job) if kind in ("asleep", "woken", "running")]
    assert seen[:3] == ["running", "asleep", "woken"] and seen[-2:] == ["running", "asleep"]
    assert (await site.client.complete(job))["state"] == "succeeded", "also in its sleep"


async def test_a_request_that_waits_too_long_for_a_waking_job_is_told_to_come_again(site: Site, store: Store) -> None:
    job = await made(site, store, sleep_s=0.2, wake_s=0.3)
    await asleep(site, job)
    other = await site.job()
    async with site.openai(job) as model:
        with pytest.raises(openai.InternalServerError, match="is ready now: it waits for") as refused:
            await model.chat.completions.create(model=job, messages=HELLO)
        assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "2")
        await site.client.cancel(other)
        await ran(store, job, 2)  # it went on waking


async def test_a_sleeping_job_ends_when_nobody_asks_for_longer_still(site: Site, store: Store) -> None:
    job = await made(site, store, sleep_s=0.2, idle_s=0.6)
    record = await site.client.wait(job, WAIT_S)
    assert (record["state"], record["reason"]) == ("succeeded", "idle for 0.6 s (serving.idle_s)")


async def test_idle_time_of_a_sleeping_job_counts_from_its_last_request(store: Store) -> None:
    """Not from when it fell asleep: a job may lend its workers shortly before its idle time is up."""
    spec = parse_spec({"name": "chat", "kind": "inference", "model": {"base": "m"}, "serving": {"idle_s": 3600.0}})
    await store.create_job(id="j-lent000000", spec=spec.model_dump(mode="json"), tenant="default")
    now = time.time()
    for quiet_s, state in ((3500.0, JobState.QUEUED), (3600.0, JobState.SUCCEEDED)):
        await store.update("j-lent000000", asleep=True, since=now, quiet_since=now - quiet_s)
        job = await store.job("j-lent000000")
        assert not await update_untrained(store, job, Cluster([], []), {job.id})
        assert (await store.job(job.id)).state == state


async def test_a_job_that_was_woken_since_it_was_looked_at_does_not_end(store: Store) -> None:
    serving = {"sleep_s": 1.0, "idle_s": 2.0}
    spec = parse_spec({"name": "chat", "kind": "inference", "model": {"base": "m"}, "serving": serving})
    await store.create_job(id="j-woken00000", spec=spec.model_dump(mode="json"), tenant="default")
    await store.update("j-woken00000", asleep=True, since=1.0)
    seen = await store.job("j-woken00000")
    await store.update("j-woken00000", asleep=False)
    assert not await update_untrained(store, seen, Cluster([], []), {seen.id})
    assert (await store.job(seen.id)).state == JobState.QUEUED
    await store.update("j-woken00000", asleep=True)
    with pytest.raises(Fenced):  # nor by a scheduler that slept while another one came to lead
        await update_untrained(store, seen, Cluster([], []), {seen.id}, leader=7)
    assert (await store.job(seen.id)).state == JobState.QUEUED
    assert not await update_untrained(store, seen, Cluster([], []), {seen.id})
    assert (await store.job(seen.id)).state == JobState.SUCCEEDED


async def test_requests_wait_for_a_sleeping_job_and_not_for_one_that_never_ran(store: Store) -> None:
    """Also where it names no serving.sleep_s: it may have lent its workers."""
    spec = parse_spec({"name": "chat", "kind": "inference", "model": {"base": "m"}})
    await store.create_job(id="j-new0000000", spec=spec.model_dump(mode="json"), tenant="default")
    new = await store.job("j-new0000000")
    with pytest.raises(InvalidField, match="is queued"):
        refuse_unless_served(new)
    refuse_unless_served(msgspec.structs.replace(new, epoch=1, asleep=True))
    refuse_unless_served(msgspec.structs.replace(new, epoch=1))


@pytest.mark.parametrize(
    ("serving", "field"), [({"sleep_s": 60, "idle_s": 60}, "serving.idle_s"), ({"sleep_s": 0}, "serving.sleep_s")]
)
def test_settings_of_sleep_that_make_no_sense_are_refused(serving: dict[str, Any], field: str) -> None:
    chat = {"name": "x", "kind": "inference", "model": {"base": "m"}, "serving": serving}
    assert list(refusals(parse_spec, chat)) == [field]
