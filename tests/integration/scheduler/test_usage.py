"""Usage of jobs is counted once, whichever process dies and however often a message arrives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from opentinker import AsyncClient
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import KINDS, UsageStore, cpu_seconds, metered
from tests.conftest import NewContext, until
from tests.integration.client.test_cli import typed
from tests.support.api import OPERATOR, SPEC, Http
from tests.support.scheduling import new_job, scheduler

BUSY = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"


@pytest.fixture
async def job(store: Store) -> str:
    return await new_job(store, f"j-{uuid.uuid4().hex[:10]}")


async def spent(store: Store, job: str) -> dict[str, float]:
    (found,) = await UsageStore(store.redis).of_jobs([job])
    return {kind: number for kind, number in found.items() if number}


async def test_what_is_said_again_adds_nothing(store: Store, job: str) -> None:
    usage = UsageStore(store.redis)
    for total in (10.0, 25.5, 25.5, 12.0):
        await usage.count(job, "a", {"cpu_s": total, "tokens_generated": 2 * total})
    await usage.count(job, "b", {"cpu_s": 1.0})
    assert await spent(store, job) == {"cpu_s": 26.5, "tokens_generated": 51.0}


async def test_a_step_that_is_trained_again_is_not_counted_again(store: Store, job: str) -> None:
    usage = UsageStore(store.redis)
    for step in (1, 2, 3, 2, 3, 4):  # resumed from a checkpoint of step 1
        await usage.trained(job, step, 100.0)
    assert await spent(store, job) == {"tokens_trained": 400.0}


async def test_of_a_job_that_does_not_exist_nothing_is_counted(store: Store) -> None:
    await UsageStore(store.redis).count("j-0000000000", "a", {"cpu_s": 1.0})
    assert await spent(store, "j-0000000000") == {}


async def test_days_are_the_tenants(store: Store, job: str) -> None:
    usage, today = UsageStore(store.redis), datetime.now(UTC).date()
    other = await new_job(store, f"j-{uuid.uuid4().hex[:10]}")
    await usage.count(job, "a", {"cpu_s": 1.0})
    await usage.count(other, "a", {"cpu_s": 2.0})
    found = await usage.of_days("default", today - timedelta(days=1), today + timedelta(days=1))
    assert sum(day["cpu_s"] for day in found.values()) == 3.0
    assert await usage.of_days("another", today, today) == {}


async def test_a_lease_counts_its_processes_and_what_its_work_says(store: Store, job: str) -> None:
    said: Counter[str] = Counter()
    async with metered(store.redis, job, said):
        assert await (await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY)).wait() == 0
        said["tokens_generated"] += 7
    found = await spent(store, job)
    assert found.keys() == {"cpu_s", "tokens_generated"}, "time is that of leases, which the scheduler counts"
    assert found["tokens_generated"] == 7 and found["cpu_s"] >= 0.3
    async with metered(store.redis, job, Counter(tokens_generated=3)):
        pass
    assert (await spent(store, job))["tokens_generated"] == 10


async def test_what_is_spent_is_said_while_it_is(store: Store, job: str) -> None:
    said: Counter[str] = Counter()
    async with metered(store.redis, job, said, report_s=0.05):
        said["tokens_generated"] += 7
        await until(lambda: spent(store, job), lambda found: found.get("tokens_generated") == 7)


async def test_a_lease_that_is_taken_back_while_it_ends_is_counted(store: Store, job: str) -> None:
    ends, go_on = threading.Event(), threading.Event()
    seconds = iter([0.0, 2.0])

    def cpu() -> float:
        found = next(seconds)
        if found:  # the last report
            ends.set()
            go_on.wait()
        return found

    async def lease() -> None:
        async with metered(store.redis, job, Counter(tokens_generated=3), cpu=cpu):
            pass

    task = asyncio.create_task(lease())
    await until(ends.is_set)
    task.cancel()
    for _ in range(5):  # turns of the loop, in which the cancellation reaches what the task waits for
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await spent(store, job) == {"cpu_s": 2.0, "tokens_generated": 3.0}


def test_processor_time_never_falls_when_a_child_ends() -> None:
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", BUSY + "\ninput()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        while cpu_seconds() < before + 0.3:
            assert child.poll() is None
        running = cpu_seconds()
        child.stdin.close()
        child.wait()
    assert cpu_seconds() >= running


async def test_usage_is_served_by_job_day_and_key(client: AsyncClient, ctx: Context, store: Store) -> None:
    first, second = (await client.submit(SPEC))["id"], (await client.submit(SPEC))["id"]
    await UsageStore(store.redis).count(first, "a", {"cpu_s": 1.5})
    await UsageStore(store.redis).trained(second, 1, 40)
    home = ctx.settings.data_dir / "jobs" / first
    home.mkdir(parents=True)
    (home / "metrics.jsonl").write_bytes(b"12345")
    await ArtifactIndex(store.redis).add("default", second, ArtifactEntry(path="logs.jsonl", bytes=7, created=0.0))
    await Archiver(ctx).count()
    found = await client.usage()
    assert [row["job"] for row in found["usage"]] == [second, first]
    assert found["usage"][1]["cpu_s"] == 1.5 and found["usage"][1]["bytes_stored"] == 5
    spent = {"cpu_s": 1.5, "tokens_trained": 40, "bytes_stored": 12, "cost": None}
    assert (found["total"], found["currency"]) == ({**dict.fromkeys(KINDS, 0), **spent}, "")
    assert [row["job"] for row in (await client.usage(job=first))["usage"]] == [first]
    assert not found["more"] and (await client.usage(limit=1))["more"]
    (today,) = (await client.usage("day"))["usage"]
    assert (today["cpu_s"], today["tokens_trained"], today["bytes_stored"]) == (1.5, 40, 7)
    (key,) = (await client.usage("key"))["usage"]
    assert (key["jobs"], key["bytes_stored"]) == (2, 12)


async def test_bytes_of_several_tenants_are_read_at_once(store: Store, job: str) -> None:
    index, (one, two) = ArtifactIndex(store.redis), (f"t-{job}-{n}" for n in range(2))
    for owner, left, size in ((one, job, 5), (one, f"{job}x", 7), (two, f"{job}y", 3)):
        await index.add(owner, left, ArtifactEntry(path="logs.jsonl", bytes=size, created=0.0))
    found = await index.stored_by([two, "t-nobody", one])
    assert found == {two: {f"{job}y": 3}, "t-nobody": {}, one: {f"{job}x": 7, job: 5}}
    assert list(found[one]) == [f"{job}x", job] and found[one] == await index.stored(one)
    assert await index.stored_by([]) == {}


async def test_wrong_questions_about_usage_are_refused(http: Http) -> None:
    for query in ("by=year", "by=day&from=2026-02-31", "by=day&from=2026-01-02&to=2026-01-01", "limit=0"):
        assert (await http("GET", f"/v1/usage?{query}"))[0] == 422
    assert (await http("GET", "/v1/usage?job=j-0000000000"))[0] == 404


async def test_usage_has_its_price(new_context: NewContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    prices = {"price_worker_hour": 3.6, "price_gpu_hour": 36.0, "price_currency": "EUR"}
    async with new_context(**prices) as ctx, scheduler(ctx) as url, AsyncClient(url, api_key=OPERATOR) as client:
        job = (await client.submit(SPEC))["id"]
        await ctx.store.redis.hset(f"spent:job:{job}", mapping={"worker_s": 1000.0, "gpu_s": 500.0})
        for by in ("job", "key"):
            found = await client.usage(by)
            assert found["currency"] == "EUR" and found["usage"][0]["cost"] == pytest.approx(1.0 + 5.0)
            assert found["total"]["cost"] == pytest.approx(6.0)
        command = await asyncio.to_thread(typed, "usage", "--url", url)
        assert "cost (EUR)" in command.stdout and command.stdout.splitlines()[1].endswith("6.00"), command
