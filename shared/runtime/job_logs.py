"""Ships log lines that belong to a job from every service to readers of the job's log.

ship   a structlog processor: consumes every line that is written, keeps those bound to a job, never waits
send   consumes the kept lines; produces LOG; polls four times a second; counts and reports lines that found no room

Lines are sent without an ack: lines written while NATS is away are lost here, and remain in the service's own log.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import structlog

from opentinker.shared.asyncio_tools import every
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import LOG
from opentinker.shared.security.redact import without_secrets
from opentinker.shared.types.telemetry import LEVELS, LogLine

OUTSIDE = "server"
"""Field of lines outside of the job's log that has the job."""
ROOM = 2000
"""Lines that wait to be sent."""
SEND_S = 0.25
TEXT = 2000
"""Characters of a field; of a traceback, its last TRACE."""
TRACE = 8000
FIELDS = 30
_JOB = re.compile(r"j-[a-z0-9]{10}")
"""Other ids belong to tests and to `cluster`, whose logs cannot be requested."""
_OWN = ("timestamp", "level", "event", "job", "service", "worker", "exception", "stack")


@contextmanager
def outside_job_log() -> Iterator[None]:
    """Keep lines of the block, and of tasks that it creates, in this service's own log: they name what belongs to other
    tenants than the job's, who reads the job's log."""
    job = structlog.contextvars.get_contextvars().get("job")
    with structlog.contextvars.bound_contextvars(job=None, **({OUTSIDE: job} if job else {})):
        yield


class JobLogs:
    def __init__(self, room: int = ROOM) -> None:
        self._lines: deque[LogLine] = deque()
        self._room = room
        self._dropped: dict[str, int] = {}
        """Dropped lines by job, since the last report."""

    def ship(self, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Queue a line for sending. Callable from any thread."""
        job = line.get("job")
        if isinstance(job, str) and _JOB.fullmatch(job) and line.get("level") in LEVELS:
            if len(self._lines) < self._room:
                self._lines.append(_as_line(job, line))
            else:
                self._dropped[job] = self._dropped.get(job, 0) + 1
        return line

    async def run(self, bus: Bus) -> None:
        await every(SEND_S, partial(self.send, bus))

    async def send(self, bus: Bus) -> None:
        """Send all waiting lines."""
        while self._lines:
            line = self._lines.popleft()
            await bus.emit(LOG, line, job=line.job, level=line.level)
        dropped, self._dropped = self._dropped, {}
        for job, count in dropped.items():
            said = LogLine(
                job=job, service="", worker="", level="warning", time=time.time(), event="log_lines_dropped",
                fields={"lines": count},
            )  # fmt: skip
            await bus.emit(LOG, said, job=job, level=said.level)


def _as_line(job: str, line: Mapping[str, Any]) -> LogLine:
    rest_of = [(name, value) for name, value in line.items() if name not in _OWN]
    fields = {name: _short(without_secrets(_plain(value), name)) for name, value in rest_of[:FIELDS]}
    return LogLine(
        job=job,
        service=str(line.get("service", "")),
        worker=str(line.get("worker", "")),
        level=str(line["level"]),
        time=time.time(),
        event=str(without_secrets(str(line.get("event", ""))))[:TEXT],
        fields=fields,
        trace=str(without_secrets(str(line.get("exception", "") or line.get("stack", ""))))[-TRACE:],
    )


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent; anything else as its text."""
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return str(value)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= TEXT else f"{value[:TEXT]}... ({len(value) - TEXT} more characters)"
    if isinstance(value, dict | list) and len(said := str(value)) > TEXT:
        return f"{said[:TEXT]}... ({len(said) - TEXT} more characters)"
    return value
