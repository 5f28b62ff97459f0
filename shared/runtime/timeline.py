"""Records a worker's activity as segments on the lanes of a job's timeline, so that pipeline bubbles become visible.

    with lanes.busy("generation", "rollout"): ...   --once a second--> TIMELINE: a few segments

Lanes: `generation`, `env`, `reference`, `training`, `swap`, `loading`. Many may be busy on one lane at a time (episodes
of a rollout worker, sessions of an env worker): together they are one segment, and `level` says how many they were on
average. Nothing waits for this.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from opentinker.shared.asyncio_tools import every
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.types.telemetry import Segment, TimelinePart

REPORT_S = 1.0
GLUE_S = 0.02
MAX_SEGMENTS = 100
"""Segments a second of one worker and job; the longest stay, the others are counted."""
FORGET_S = 60.0


Key = tuple[str, str, str]
"""Lane, kind, version."""


@dataclass(slots=True)
class _OpenSegment:
    """Activity on the lane since `start`, or until a moment ago; `area`: seconds times activities, up to `seen`."""

    start: float
    seen: float
    count: int = 0
    area: float = 0.0
    since: float = 0.0
    """When it began, if that has been reported."""

    def upto(self, now: float) -> None:
        if now > self.seen:
            self.area += self.count * (now - self.seen)
            self.seen = now


class Lanes:
    """Lanes of one worker for one job. `clock`: Unix seconds; `glue_s`: gaps up to this length are merged."""

    def __init__(
        self, bus: Bus, job: str, worker: str, clock: Callable[[], float] = time.time, *, glue_s: float = GLUE_S
    ) -> None:
        self._bus, self._job, self._worker, self._clock = bus, job, worker, clock
        self._glue_s = glue_s
        self._incarnation = uuid.uuid4().hex[:8]
        self._seq = 0
        self._open: dict[Key, _OpenSegment] = {}
        self._closed: list[Segment] = []
        self._version = ""
        self.heard = clock()
        """When there was something to report last."""

    @contextmanager
    def busy(self, lane: str, kind: str, version: str | None = None) -> Iterator[None]:
        """`version`: of weights, default: those that are in use."""
        key = self.begin(lane, kind, version)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, lane: str, kind: str, version: str | None = None) -> Key:
        """As `busy`, up to `end` of what this returns."""
        key = (lane, kind, self._version if version is None else version)
        now = self._clock()
        found = self._open.get(key)
        if found is not None and not found.count and now - found.seen > self._glue_s:
            self._close(key, found)
            found = None
        if found is None:
            found = self._open[key] = _OpenSegment(now, now)
        found.upto(now)
        found.count += 1
        return key

    def end(self, key: Key) -> None:
        found = self._open.get(key) or self._open[key[0], key[1], self._version]
        found.upto(self._clock())
        found.count -= 1

    @property
    def goes_on(self) -> bool:
        return any(lane.count for lane in self._open.values())

    def note(
        self,
        lane: str,
        kind: str,
        start: float,
        end: float,
        *,
        version: str = "",
        level: float = 1.0,
        since: float = 0.0,
    ) -> None:
        """Add a segment that is known only afterwards. `since`: when it began, if an earlier one has its beginning."""
        segment = Segment(
            lane=lane, kind=kind, start=start, end=max(start, end), version=version, level=level, since=since
        )
        self._closed.append(segment)

    def use(self, version: str) -> None:
        """Set the current weights: new segments use this version, running ones keep the previous one."""
        before, self._version = self._version, version
        for key in [key for key in self._open if key[2] == before and before != version]:
            lane = self._open.pop(key)
            now = self._close(key, lane)
            if lane.count:
                self._open[key[0], key[1], version] = _OpenSegment(now, now, lane.count)

    async def run(self) -> None:
        await every(REPORT_S, self.report)

    async def report(self) -> None:
        """Publish segments since the last call, including the running ones up to now."""
        for key, lane in list(self._open.items()):
            now = self._close(key, lane)
            lane.since = lane.since or lane.start
            lane.start, lane.area = now, 0.0
            if not lane.count:
                del self._open[key]
        if not self._closed:
            return
        self.heard = self._clock()
        found, self._closed = glued(self._closed, self._glue_s), []
        longest = sorted(found, key=lambda segment: segment.start - segment.end)[:MAX_SEGMENTS]
        part = TimelinePart(
            job=self._job,
            worker=self._worker,
            incarnation=self._incarnation,
            seq=self._seq,
            segments=sorted(longest, key=lambda segment: segment.start),
            left_out=len(found) - len(longest),
        )
        self._seq += 1
        await self._bus.emit(TIMELINE, part, job=self._job, worker=self._worker)

    def _close(self, key: Key, lane: _OpenSegment) -> float:
        """Up to when."""
        if lane.count:
            lane.upto(self._clock())
        length = lane.seen - lane.start
        if length > 0:
            name, kind, version = key
            self.note(name, kind, lane.start, lane.seen, version=version, level=lane.area / length, since=lane.since)
        return lane.seen


class LanesByJob:
    """Lanes of a worker that serves several jobs."""

    def __init__(self, bus: Bus, worker: str, *, glue_s: float = GLUE_S, forget_s: float = FORGET_S) -> None:
        self._bus, self._worker, self._glue_s, self._forget_s = bus, worker, glue_s, forget_s
        self._jobs: dict[str, Lanes] = {}

    def of(self, job: str) -> Lanes:
        lanes = self._jobs.get(job)
        if lanes is None:
            lanes = self._jobs[job] = Lanes(self._bus, job, self._worker, glue_s=self._glue_s)
        return lanes

    async def run(self) -> None:
        await every(REPORT_S, self.report)

    async def report(self) -> None:
        """Report the lanes of each job."""
        for job, lanes in list(self._jobs.items()):
            await lanes.report()
            if not lanes.goes_on and time.time() - lanes.heard > self._forget_s:
                del self._jobs[job]


def glued(segments: list[Segment], glue_s: float = GLUE_S) -> list[Segment]:
    """Neighbours that nothing parts are one."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.lane, s.kind, s.version, s.start)):
        last = found[-1] if found else None
        what = (segment.lane, segment.kind, segment.version)
        if last is None or (last.lane, last.kind, last.version) != what or segment.start - last.end > glue_s:
            found.append(segment)
            continue
        end = max(last.end, segment.end)
        area = last.level * (last.end - last.start) + segment.level * (segment.end - segment.start)
        level = area / (end - last.start) if end > last.start else last.level
        found[-1] = msgspec.structs.replace(last, end=end, level=level)
    return found
