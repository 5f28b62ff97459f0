"""Curves over HTTP have every point that metrics.jsonl has, also those that a full METRICS stream has dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from opentinker.services.scheduler.artifacts.catalog import Artifacts, key_of
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.messaging.subjects import METRIC, METRICS
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.artifacts import ArtifactEntry
from opentinker.shared.types.telemetry import MetricPoint
from tests.conftest import Server
from tests.support.api import Http, bearing
from tests.support.scheduling import context, scheduler

FULL = 32 * 1024
"""Bytes that METRICS holds in these tests: about 100 points."""


class Writer:
    """A job's trainer and one rollout worker, as far as metrics go."""

    def __init__(self, ctx: Context, job: str) -> None:
        self.ctx, self.job, self.step = ctx, job, 0
        self.path = ctx.settings.data_dir / "jobs" / job / "metrics.jsonl"
        self._log = StepLog(self.path)
        self._trainer, self._worker = MetricSource(ctx.bus, job, "trainer"), MetricSource(ctx.bus, job, "rollout-0")

    async def write(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            point = await self._trainer.emit(self.step, {"loss": 1.0 / self.step, "lr": 0.1})
            named = {"time": point.time, "point": [point.incarnation, point.seq]}
            self._log.add({"epoch": 1, "step": self.step, **named, "seqs": [1, 2], **point.values})
            await self._worker.emit(self.step, {"rollout/groups": 1.0})
            await self.ctx.bus.settle()


async def fill(ctx: Context, points: int) -> None:
    """Points of another job, as many as METRICS holds and more."""
    other = MetricSource(ctx.bus, "j-other00000", "rollout-1")
    for number in range(points):
        await other.emit(number, {"rollout/groups": float(number)})
        if number % 50 == 0:
            await ctx.bus.settle()
    await ctx.bus.settle()


async def first_step(ctx: Context, job: str) -> int | None:
    """Of the trainer's points that the stream has."""
    found = await ctx.bus.history(METRIC, 0, 1, job=job, source="trainer")
    return found[0][1].step if found else None


class Reader:
    """Reads page by page, always from the last cursor."""

    def __init__(self, http: Http, job: str, query: str = "limit=7") -> None:
        self.http, self.path, self.cursor = http, f"/v1/jobs/{job}/metrics?{query}", 0

    async def page(self) -> tuple[list[dict[str, Any]], bool]:
        status, page = await self.http("GET", f"{self.path}&after={self.cursor}")
        assert status == 200
        self.cursor = page["cursor"]
        return page["metrics"], page["more"]

    async def rest(self) -> list[dict[str, Any]]:
        points, more = await self.page()
        while more:
            found, more = await self.page()
            points += found
        return points


def steps(points: list[dict[str, Any]]) -> list[int]:
    return [point["step"] for point in points if point["source"] == "trainer"]


@pytest.fixture
async def full(own_server: Server, valkey_server: Server, tmp_path: Path) -> AsyncIterator[tuple[Context, Http]]:
    """A scheduler whose METRICS stream is small."""
    async with (
        context(own_server, valkey_server, "scheduler-0", tmp_path) as ctx,
        scheduler(ctx) as url,
        aiohttp.ClientSession(headers=bearing()) as session,
    ):
        await ctx.bus.js.update_stream(METRICS.evolve(max_bytes=FULL))
        yield ctx, Http(session, url)


async def test_points_that_a_full_stream_dropped_are_read_from_the_file(full: tuple[Context, Http]) -> None:
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(200)
    first = await first_step(ctx, job)
    assert first is not None and 20 < first <= 200, "the stream has dropped some points, not all"
    points = await Reader(http, job).rest()
    assert steps(points) == list(range(1, 201)), "each of them once, in order"
    of_trainer = [point for point in points if point["source"] == "trainer"]
    assert [point["values"] for point in of_trainer] == [{"loss": 1.0 / n, "lr": 0.1} for n in range(1, 201)]
    assert [point["seq"] for point in of_trainer] == list(range(200))
    assert len({point["incarnation"] for point in of_trainer}) == 1
    assert [p["cursor"] for p in points] == sorted({p["cursor"] for p in points}), "cursors grow"
    few = await Reader(http, job, "limit=1000&source=trainer&names=loss").rest()
    assert [point["values"] for point in few] == [{"loss": 1.0 / n} for n in range(1, 201)]
    of_worker = await Reader(http, job, "limit=1000&source=rollout-0").rest()
    assert {point["source"] for point in of_worker} == {"rollout-0"} and len(of_worker) < 200


async def test_reader_lacks_nothing_when_the_stream_drops_points_between_two_pages(full: tuple[Context, Http]) -> None:
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(20)
    reader = Reader(http, job)
    read, more = await reader.page()
    assert more and steps(read), "it has read a part of the stream"
    await writer.write(200)
    first = await first_step(ctx, job)
    assert first is not None and first > 20
    while more:
        found, more = await reader.page()
        read += found
    assert set(steps(read)) == set(range(1, 221))
    named = [(p["source"], p["incarnation"], p["seq"]) for p in read]
    twice = len(named) - len(set(named))
    assert twice <= len(steps(read)) - 220 <= 20, "at most what it had read comes twice"
    await writer.write(3)
    assert steps(await reader.rest()) == [221, 222, 223]


async def test_reader_of_a_job_whose_points_are_all_dropped_gets_them_once(full: tuple[Context, Http]) -> None:
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(30)
    earlier = Reader(http, job)
    assert steps(await earlier.rest()) == list(range(1, 31))
    await fill(ctx, 300)
    assert await first_step(ctx, job) is None
    late = Reader(http, job)
    assert steps(await late.rest()) == list(range(1, 31))
    await earlier.rest()
    for _ in range(2):
        await fill(ctx, 100)
        assert await late.rest() == [] and await earlier.rest() == [], "others' points bring nothing back"
    await writer.write(3)
    assert steps(await late.rest()) == steps(await earlier.rest()) == [31, 32, 33]


async def test_dropped_points_are_read_from_the_artifact_store_when_the_job_is_over(full: tuple[Context, Http]) -> None:
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(10)
    await fill(ctx, 300)
    record, artifacts = await ctx.store.job(job), Artifacts(ctx)
    entry = ArtifactEntry(path="metrics.jsonl", place="metrics.jsonl.1", bytes=1, created=1.0)
    await artifacts.store.put(f"{key_of(record)}/{entry.at}", writer.path)
    await artifacts.index.add(record.tenant, job, entry, before=None)
    writer.path.unlink()
    assert steps(await Reader(http, job).rest()) == list(range(1, 11))


async def test_torn_lines_and_lines_without_the_name_of_their_point_are_no_obstacle(
    full: tuple[Context, Http],
) -> None:
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(2)
    lines = writer.path.read_bytes().splitlines()
    old = {name: value for name, value in msgspec.json.decode(lines[0]).items() if name != "point"}
    writer.path.write_bytes(b"\n".join([msgspec.json.encode(old), lines[1][:20], lines[1], b'{"epoch": 1, "st']))
    await fill(ctx, 300)
    points = await Reader(http, job, "limit=1").rest()
    assert steps(points) == [1, 2]
    assert (points[0]["incarnation"], points[0]["seq"]) == ("metrics.jsonl", 1)


async def test_job_whose_points_are_all_in_the_stream_gets_none_from_the_file(full: tuple[Context, Http]) -> None:
    """Its newest line may be there before its point is."""
    ctx, http = full
    await fill(ctx, 5)
    job = await http.job()
    writer = Writer(ctx, job)
    await writer.write(3)
    late = MetricPoint(job=job, source="trainer", incarnation="x", seq=0, time=4e9, step=4, values={})
    StepLog(writer.path).add({"epoch": 1, "step": 4, "time": late.time, "point": ["x", 0]})
    reader = Reader(http, job)
    points = await reader.rest()
    assert steps(points) == [1, 2, 3] and all(point["cursor"] % 2 == 0 for point in points)
    await MetricSource(ctx.bus, job, "trainer").send(late)
    await ctx.bus.settle()
    assert steps(await reader.rest()) == [4]
