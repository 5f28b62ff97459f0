"""Curves over HTTP have every point that metrics.jsonl has, also those that a full METRICS stream has dropped."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog, key_of
from opentinker.services.scheduler.jobs.metric_history import OLDEST_POINTS
from opentinker.shared.data.step_log import StepLog, metric_prefix, trainer_source
from opentinker.shared.messaging.subjects import METRIC, METRICS
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.artifacts import ArtifactEntry
from opentinker.shared.types.core import JobState, part_id
from opentinker.shared.types.telemetry import MetricPoint
from tests.conftest import Server, until
from tests.support.api import Http
from tests.support.scheduling import new_job, served

FULL = 32 * 1024
"""Bytes that METRICS holds in these tests: about 100 points."""
Full = tuple[Context, Http]
"""A scheduler whose METRICS stream is small."""


class Writer:
    """A job's trainer and one rollout worker, as far as metrics go."""

    def __init__(self, ctx: Context, job: str, step: int = 0, ahead_s: float = 0.0, policy: str = "") -> None:
        """`ahead_s`: how far the trainer's clock is ahead."""
        self.ctx, self.job, self.step, self.ahead_s = ctx, job, step, ahead_s
        self.path = ctx.settings.data_dir / "jobs" / part_id(job, policy) / "metrics.jsonl"
        self._log = StepLog(self.path)
        self._trainer = MetricSource(ctx.bus, job, trainer_source(policy), prefix=metric_prefix(policy))
        self._worker, self._prefix = MetricSource(ctx.bus, job, "rollout-0"), metric_prefix(policy)

    async def write(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            point = await self._trainer.emit(self.step, {"loss": 1.0 / self.step, "lr": 0.1})
            values = {name.removeprefix(self._prefix): value for name, value in point.values.items()}
            named = {"time": point.time + self.ahead_s, "point": [point.incarnation, point.seq]}
            self._log.add({"epoch": 1, "step": self.step, **named, "seqs": [1, 2], **values})
            await self._worker.emit(self.step, {"rollout/groups": 1.0})
            await self.ctx.bus.settle()

    async def emit(self) -> None:
        """A point without a line."""
        self.step += 1
        await self._trainer.emit(self.step, {"loss": 1.0 / self.step})
        await self.ctx.bus.settle()
        await until(self._is_stored)

    async def _is_stored(self) -> bool:
        """Return whether the stream has the last point: it stores what has reached the server a moment later."""
        found = await self.ctx.bus.history(METRIC, 0, 1000, job=self.job, source="trainer")
        return bool(found) and found[-1][1].step == self.step


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
async def full(own_server: Server, valkey_server: Server, tmp_path: Path) -> AsyncIterator[Full]:
    async with served(own_server, valkey_server, tmp_path) as (ctx, http):
        await ctx.bus.js.update_stream(METRICS.evolve(max_bytes=FULL))
        yield ctx, http


@pytest.fixture
async def writer(full: Full) -> Writer:
    ctx, http = full
    return Writer(ctx, await http.job())


async def test_points_that_a_full_stream_dropped_are_read_from_the_file(full: Full, writer: Writer) -> None:
    (ctx, http), job = full, writer.job
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


async def test_reader_lacks_nothing_when_the_stream_drops_points_between_two_pages(full: Full, writer: Writer) -> None:
    (ctx, http), job = full, writer.job
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


async def test_reader_of_a_job_whose_points_are_all_dropped_gets_them_once(full: Full, writer: Writer) -> None:
    (ctx, http), job = full, writer.job
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


async def test_dropped_points_are_read_from_the_artifact_store_when_the_job_is_over(full: Full, writer: Writer) -> None:
    (ctx, http), job = full, writer.job
    await writer.write(10)
    await fill(ctx, 300)
    record, artifacts = await ctx.store.job(job), ArtifactCatalog(ctx)
    entry = ArtifactEntry(path="metrics.jsonl", place="metrics.jsonl.1", bytes=1, created=1.0)
    await artifacts.store.put(f"{key_of(record)}/{entry.at}", writer.path)
    await artifacts.index.add(record.tenant, job, entry, before=None)
    writer.path.unlink()
    assert steps(await Reader(http, job).rest()) == list(range(1, 11))


async def test_trainers_whose_clocks_differ_leave_no_gap(full: Full) -> None:
    ctx, http = full
    job = await http.job()
    await Writer(ctx, job, ahead_s=60.0).write(50)
    await Writer(ctx, job, step=50).write(150)
    first = await first_step(ctx, job)
    assert first is not None and first > 50
    assert steps(await Reader(http, job).rest()) == list(range(1, 201))


async def test_an_empty_stream_leaves_the_lines_of_the_file(full: Full) -> None:
    """As a new NATS, or one whose damaged history was removed."""
    ctx, http = full
    job = await http.job()
    writer = Writer(ctx, job, ahead_s=-60.0)
    await writer.write(5)
    writer.ahead_s = 0.0
    await writer.write(1)
    await ctx.bus.js.purge_stream(METRICS.name)
    assert steps(await Reader(http, job).rest()) == [1, 2, 3, 4, 5], "the newest may be on its way"
    await ctx.store.transition(job, JobState.CANCELLED)
    assert steps(await Reader(http, job).rest()) == [1, 2, 3, 4, 5, 6]


async def test_torn_and_nameless_lines_are_skipped(full: Full, writer: Writer) -> None:
    (ctx, http), job = full, writer.job
    await writer.write(2)
    lines = writer.path.read_bytes().splitlines()
    old = {name: value for name, value in msgspec.json.decode(lines[0]).items() if name != "point"}
    writer.path.write_bytes(
        b"\n".join([msgspec.json.encode(old), lines[1][:20], lines[1], b"5", b"null", b"{}", b'{"epoch": 1, "st'])
    )
    await fill(ctx, 300)
    points = await Reader(http, job, "limit=1").rest()
    assert steps(points) == [1, 2]
    assert (points[0]["incarnation"], points[0]["seq"]) == ("metrics.jsonl", 1)


async def test_job_whose_points_are_all_in_the_stream_gets_none_from_the_file(full: Full) -> None:
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


@pytest.mark.parametrize(("lines", "without"), [(10, OLDEST_POINTS), (10, 1), (0, 1)])
async def test_points_come_once_where_the_stream_begins_with_some_that_have_no_line(
    full: Full, lines: int, without: int
) -> None:
    """Their trainer was killed before it wrote the lines."""
    ctx, http = full
    await ctx.bus.js.update_stream(METRICS)
    job = await http.job()
    await Writer(ctx, job).write(5)
    killed = Writer(ctx, job, step=5)
    await killed.write(lines)
    await killed.emit()
    await ctx.bus.js.purge_stream(METRICS.name, seq=(await ctx.bus.js.stream_info(METRICS.name)).state.last_seq)
    for _ in range(without - 1):
        await killed.emit()
    await Writer(ctx, job, step=killed.step).write(20)
    assert await first_step(ctx, job) == killed.step - without + 1
    for limit in (1, 7, 1000):
        assert steps(await Reader(http, job, f"limit={limit}").rest()) == list(range(1, killed.step + 21))


async def test_reader_waits_for_a_line_whose_point_may_still_arrive(full: Full, writer: Writer) -> None:
    """With a cursor behind later points of other sources it would never get that line."""
    (ctx, http), job = full, writer.job
    await writer.write(3)
    await ctx.bus.js.purge_stream(METRICS.name)
    await fill(ctx, 1)
    writer.ahead_s = 3600.0
    await writer.write(1)
    await ctx.bus.purge(str(METRICS.name), METRIC.at(job=job, source="trainer"))
    reader = Reader(http, job)
    assert steps(await reader.rest()) == [1, 2, 3]
    *lines, last = writer.path.read_bytes().splitlines(keepends=True)
    old = msgspec.json.decode(last) | {"time": time.time() - 60.0}
    writer.path.write_bytes(b"".join([*lines, msgspec.json.encode(old), b"\n"]))
    points = await reader.rest()
    assert [(point["source"], point["step"]) for point in points] == [("trainer", 4), ("rollout-0", 4)]


async def test_point_that_comes_late_hides_no_lines(full: Full, writer: Writer) -> None:
    """It was lost by a NATS server that was killed, and sent again: the stream has dropped those that came after it."""
    (ctx, http), job = full, writer.job
    await writer.write(2)
    ((_, late),) = await ctx.bus.history(METRIC, 0, 1, job=job, source="trainer")
    await writer.write(8)
    await until(writer._is_stored)
    await ctx.bus.js.purge_stream(METRICS.name)
    await writer.write(1)
    assert await first_step(ctx, job) == 11
    await ctx.bus.emit(METRIC, late, "sent again", job=job, source="trainer")
    await ctx.bus.settle()
    points = await Reader(http, job, "limit=1000").rest()
    assert sorted(steps(points)) == list(range(1, 12)), "each of them once"


# --- several policies ------------------------------------------------------------------------------------------------


async def pair(ctx: Context) -> tuple[str, Writer, Writer]:
    """A job with two policies, and what writes their metrics."""
    game: dict[str, Any] = {
        "environment": {"name": "signalling"},
        "policies": {"speaker": {}, "listener": {}},
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    job = await new_job(ctx.store, **game)
    return job, Writer(ctx, job, policy="speaker"), Writer(ctx, job, policy="listener")


def steps_of(points: list[dict[str, Any]], policy: str) -> list[int]:
    return [point["step"] for point in points if point["source"] == f"trainer~{policy}"]


async def test_dropped_points_of_all_policies_come_from_their_files(full: Full) -> None:
    """One of them has made its last step long ago."""
    ctx, http = full
    job, speaker, listener = await pair(ctx)
    for _ in range(30):
        await listener.write(1)
        await speaker.write(2)
    await speaker.write(140)
    for limit in (7, 1000):
        points = await Reader(http, job, f"limit={limit}").rest()
        assert steps_of(points, "speaker") == list(range(1, 201)), "each of them once, in order"
        assert steps_of(points, "listener") == list(range(1, 31))
        own = [point["values"] for point in points if point["source"] == "trainer~listener"]
        assert own[:2] == [{"listener/loss": 1.0 / n, "listener/lr": 0.1} for n in (1, 2)]
    alone = await Reader(http, job, "limit=7&source=trainer~speaker").rest()
    assert steps_of(alone, "speaker") == list(range(1, 201)) == [point["step"] for point in alone]
    assert await Reader(http, job, "source=trainer").rest() == []


async def test_reader_of_several_policies_lacks_nothing_when_the_stream_drops_more(full: Full) -> None:
    ctx, http = full
    job, speaker, listener = await pair(ctx)
    readers = [Reader(http, job, f"limit={limit}") for limit in (5, 11, 40)]
    read: list[list[dict[str, Any]]] = [[] for _ in readers]
    for _ in range(12):
        await speaker.write(9)
        await listener.write(4)
        await speaker.write(3)
        for reader, points in zip(readers, read, strict=True):
            points.extend((await reader.page())[0])
    for reader, points in zip(readers, read, strict=True):
        points.extend(await reader.rest())
        assert set(steps_of(points, "speaker")) == set(range(1, 145))
        assert set(steps_of(points, "listener")) == set(range(1, 49))
        assert await reader.rest() == []


async def test_lines_that_one_policy_still_has_in_the_stream_do_not_hide_dropped_ones(full: Full) -> None:
    ctx, http = full
    job, speaker, listener = await pair(ctx)
    for _ in range(5):
        await speaker.write(1)
        await listener.write(1)
    await ctx.bus.purge(str(METRICS.name), METRIC.at(job=job, source="trainer~listener"))
    await ctx.store.transition(job, JobState.CANCELLED)
    for limit in (1, 3, 1000):
        points = await Reader(http, job, f"limit={limit}").rest()
        assert steps_of(points, "listener") == [1, 2, 3, 4, 5] and set(steps_of(points, "speaker")) == {1, 2, 3, 4, 5}
