"""Reads the metric history of a job in pages, for `GET /v1/jobs/JOB/metrics`.

METRICS drops its oldest points when it is full. A trainer's points are also lines of the job's metrics.jsonl, so the
lines whose points have been dropped come first, and then what the stream has. Points of other sources are in the
stream only.

A cursor is even for a point of the stream (2 x sequence) and odd for a line of the file (2 x line number + 1): neither
changes when the stream drops more. A reader whose unread points were dropped may get some points twice, and none less
than metrics.jsonl has.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import orjson

from opentinker.services.scheduler.artifacts.catalog import Artifacts
from opentinker.shared.data.step_log import TRAINER_SOURCE, point_of
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC, METRICS
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.telemetry import MetricPoint

CHUNK = 1 << 20
Page = list[tuple[int, MetricPoint]]
"""Points with their cursors."""


class MetricHistory:
    def __init__(self, bus: Bus, artifacts: Artifacts) -> None:
        self._bus, self._artifacts = bus, artifacts

    async def page(self, job: JobRecord, after: int, limit: int, source: str) -> tuple[Page, bool]:
        """Return up to `limit` points above the cursor `after` (0: from the start), and whether there may be more.
        `source`: `*` for all.

        Raises NoReply while NATS is away, StoreUnavailable while the artifact store is.
        """
        number, in_file = divmod(after, 2)
        # The stream is read first: a point that it drops before the file is read is then in both, not in neither.
        found = await self._bus.history(METRIC, 0 if in_file else number, limit, job=job.id, source=source)
        lines: Page = []
        if source in ("*", TRAINER_SOURCE):
            lines = await self._read_dropped(job, number, limit, in_file=bool(in_file))
        in_both = {(point.incarnation, point.seq) for _, point in lines}
        stream = [(2 * seq, point) for seq, point in found if (point.incarnation, point.seq) not in in_both]
        return (lines + stream)[:limit], len(lines) + len(found) >= limit

    async def _count_dropped(self, start: int) -> int:
        """Return how many sequences above `start` the stream has dropped, of this job and of others."""
        assert METRICS.name is not None
        info = await self._bus.js.stream_info(METRICS.name)
        first: int = info.state.first_seq
        return max(0, first - 1 - start)

    async def _read_dropped(self, job: JobRecord, number: int, limit: int, *, in_file: bool) -> Page:
        """Return points that only the file has: those of the lines after `number`, or, for a reader who has read the
        stream up to the sequence `number`, the newest ones, as many as the stream has dropped since."""
        if in_file or number == 0:
            return await self._read_lines(job, await self._find_horizon(job), number, limit)
        dropped = await self._count_dropped(number)
        if not dropped:
            return []
        before = await self._find_horizon(job)
        last = 0
        async for line, _ in self._points(job, before, 0):
            last = line
        return await self._read_lines(job, before, max(0, last - dropped), limit)

    async def _find_horizon(self, job: JobRecord) -> float:
        """Return the time (Unix seconds) before which the stream has no point of the job's trainer.

        A job that has none left there may have sent some just now, so only lines older than the whole stream count.
        """
        for id, source in ((job.id, TRAINER_SOURCE), ("*", "*")):
            if found := await self._bus.history(METRIC, 0, 1, job=id, source=source):
                return found[0][1].time
        return float("-inf")

    async def _read_lines(self, job: JobRecord, before: float, skip: int, limit: int) -> Page:
        page: Page = []
        async with contextlib.aclosing(self._points(job, before, skip)) as points:
            async for line, point in points:
                page.append((2 * line + 1, point))
                if len(page) == limit:
                    break
        return page

    async def _points(self, job: JobRecord, before: float, skip: int) -> AsyncGenerator[tuple[int, MetricPoint]]:
        """Yield points of metrics.jsonl older than `before` with their line numbers, the first being 1, without the
        first `skip` lines."""
        number = 0
        async with contextlib.aclosing(self._lines(job)) as lines:
            async for raw in lines:
                number += 1
                if number <= skip:
                    continue
                try:
                    point = point_of(job.id, orjson.loads(raw), number)
                except orjson.JSONDecodeError:  # half a line, of a process that was killed
                    continue
                if point.time >= before:
                    return
                yield number, point

    async def _lines(self, job: JobRecord) -> AsyncGenerator[bytes]:
        opened = await self._artifacts.open_metrics(job)
        if opened is None:
            return
        try:
            rest = b""
            for first in range(0, opened.size, CHUNK):
                async for chunk in opened.chunks(first, min(CHUNK, opened.size - first)):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
        finally:
            opened.close()
