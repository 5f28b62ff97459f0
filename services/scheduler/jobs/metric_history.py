"""Reads the metric history of a job in pages, for `GET /v1/jobs/JOB/metrics`. Points are published by `MetricSource`
(shared/runtime/telemetry.py); a trainer writes metrics.jsonl (shared/data/step_log.py).

METRICS drops its oldest points when it is full. A trainer's points are also lines of the job's metrics.jsonl, so the
lines whose points have been dropped come first, and then what the stream has. Points of other sources are in the
stream only.

The files of a job with several policies count as one: their lines in the order of epoch and time. One trainer writes
them all, so new lines come last there too, and line numbers do not change.

A cursor is even for a point of the stream (2 x sequence) and odd for a line of the file (2 x line number + 1): neither
changes when the stream drops more. A reader whose unread points were dropped may get some points twice, and none less
than metrics.jsonl has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.shared.data.step_log import UNNAMED, parse_line, point_of, trainer_source
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.telemetry import MetricPoint

CHUNK = 1 << 20
Page = list[tuple[int, MetricPoint]]
"""Points with their cursors."""
Time = tuple[int, float]
"""Epoch and Unix time of a line."""
ARRIVAL_S = 10.0
"""Time within which the point of a new line is expected in the stream."""
OLDEST_POINTS = 100
"""So many of a trainer's oldest points in the stream are looked at: the oldest may have no line in the file, because
its trainer was killed before it wrote it."""


@dataclass(frozen=True)
class Horizon:
    """The beginning of the stream for one source of a job's trainer: the points of later lines are in the stream."""

    begins: dict[str, int]
    """First `seq` by incarnation, in the stream's order, of the trainer's oldest points in the stream."""
    before: float
    """Unix time from which on points without a comparable name count as in the stream. Clocks of trainers may differ:
    names decide wherever they can."""

    def is_reached(self, point: MetricPoint, previous: MetricPoint | None) -> bool:
        """`previous`: the point of the line above."""
        if not self.begins or point.incarnation == UNNAMED:
            return point.time >= self.before
        if point.incarnation in self.begins:
            return point.seq >= self.begins[point.incarnation]
        return previous is not None and previous.incarnation in self.begins  # a trainer started after those points


class MetricHistory:
    def __init__(self, bus: Bus, artifacts: ArtifactCatalog) -> None:
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
        sources = [trainer_source(policy) for policy in job.policies or ("",)]
        if wanted := [own for own in sources if source in ("*", own)]:
            lines, withheld = await self._read_dropped(job, wanted, number, limit, in_file=bool(in_file))
            if withheld:  # a reader whose cursor is in the stream would never get it
                return lines, False
        in_both = {(point.incarnation, point.seq) for _, point in lines}
        stream = [(2 * seq, point) for seq, point in found if (point.incarnation, point.seq) not in in_both]
        return (lines + stream)[:limit], len(lines) + len(found) >= limit

    async def _count_dropped(self, start: int) -> int:
        """Return how many sequences above `start` the stream has dropped, of this job and of others."""
        info = await self._bus.js.stream_info(required_stream(METRIC))
        return max(0, int(info.state.first_seq) - 1 - start)

    async def _read_dropped(
        self, job: JobRecord, sources: Sequence[str], number: int, limit: int, *, in_file: bool
    ) -> tuple[Page, bool]:
        """Return points that only the file has: those of the lines after `number`, or, for a reader who has read the
        stream up to the sequence `number`, the newest ones, as many as the stream has dropped since. The second value
        is that of `_read_lines`."""
        skip, dropped = number, 0
        if not in_file and number > 0:
            dropped = await self._count_dropped(number)
            if not dropped:
                return [], False
        horizons = {source: await self._find_horizon(job, source) for source in sources}
        if dropped:
            async with contextlib.aclosing(self._compared(job, horizons, 0)) as points:
                last = max([line async for line, _, reached in points if not reached], default=0)
            skip = max(0, last - dropped)
        return await self._read_lines(job, horizons, skip, limit)

    async def _find_horizon(self, job: JobRecord, source: str) -> Horizon:
        """A source that has no point left in the stream may have sent some just now: of a job that has not ended, only
        lines count that are older than the whole stream or than ARRIVAL_S."""
        if own := await self._bus.history(METRIC, 0, OLDEST_POINTS, job=job.id, source=source):
            begins: dict[str, int] = {}
            for _, point in own:
                begins.setdefault(point.incarnation, point.seq)  # points sent again come late, and prove nothing
            return Horizon(begins, own[0][1].time)
        if job.state.final:
            return Horizon({}, float("inf"))
        others = await self._bus.history(METRIC, 0, 1, job="*", source="*")
        return Horizon({}, max([time.time() - ARRIVAL_S, *(point.time for _, point in others)]))

    async def _read_lines(
        self, job: JobRecord, horizons: Mapping[str, Horizon], skip: int, limit: int
    ) -> tuple[Page, bool]:
        """Return up to `limit` points of lines before the horizons, without the first `skip` lines, and whether a line
        is withheld because its point is expected in the stream, which has none of its source.

        With several policies, lines beyond the horizon of one that come before a dropped line of another are returned
        too: the cursor passes them, and the stream may drop them before the reader is there."""
        page: Page = []
        beyond: Page = []
        withheld = False
        async with contextlib.aclosing(self._compared(job, horizons, skip)) as points:
            async for line, point, reached in points:
                beyond.append((2 * line + 1, point))
                if reached:
                    withheld = withheld or not horizons[point.source].begins
                    continue
                page += beyond
                beyond.clear()
                if len(page) >= limit:
                    return page[:limit], False
        return page, withheld

    async def _compared(
        self, job: JobRecord, horizons: Mapping[str, Horizon], skip: int
    ) -> AsyncGenerator[tuple[int, MetricPoint, bool]]:
        """Yield line number and point of each line of these sources after the first `skip` lines, and whether the
        horizon of its source is reached, until all are."""
        previous: dict[str, MetricPoint] = {}
        reached: set[str] = set()
        async with contextlib.aclosing(self._points(job, max(0, skip - 1))) as points:
            async for line, point in points:
                source = point.source
                if source in horizons and line > skip:
                    if source in reached or horizons[source].is_reached(point, previous.get(source)):
                        reached.add(source)
                    yield line, point, source in reached
                    if reached == horizons.keys():
                        return
                previous[source] = point

    async def _points(self, job: JobRecord, skip: int) -> AsyncGenerator[tuple[int, MetricPoint]]:
        """Yield points of metrics.jsonl with their line numbers, the first being 1. Without the first `skip` lines, or
        of several policies with all of them: each file's last line before those may be needed."""
        if not job.policies:
            async with contextlib.aclosing(self._points_of(job, skip)) as points:
                async for number, _, point in points:
                    yield number, point
            return
        async with contextlib.AsyncExitStack() as stack:
            files = [self._points_of(job.part(policy), 0) for policy in job.policies]
            for file in files:
                await stack.enter_async_context(contextlib.aclosing(file))
            heads = {place: head for place, file in enumerate(files) if (head := await anext(file, None)) is not None}
            number = 0
            while heads:
                place = min(heads, key=lambda place: (heads[place][1], place))
                _, _, point = heads.pop(place)
                number += 1
                yield number, point
                if (head := await anext(files[place], None)) is not None:
                    heads[place] = head

    async def _points_of(self, part: JobRecord, skip: int) -> AsyncGenerator[tuple[int, Time, MetricPoint]]:
        """Yield number, time and point of the lines of one file, without the first `skip` lines."""
        number = 0
        async with contextlib.aclosing(self._lines(part)) as lines:
            async for raw in lines:
                number += 1
                line = parse_line(raw) if number > skip else None
                if line is not None:  # not skipped, and not half a line of a process that was killed
                    yield number, (line.get("epoch", 0), line["time"]), point_of(part.id, line, number)

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
