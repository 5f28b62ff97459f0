"""Logs with bound ids, metric points on NATS with a counter per source, and the Prometheus registry of the process.

A process that serves one job at a time (trainer, rollout worker) has one MetricSource and emits when it has something
to say. One that serves many (env worker, reference-forward, scheduler) counts in Meters, and a Reporter emits.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO, cast

import orjson
import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as Total

from opentinker.shared.asyncio_tools import every
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.runtime.job_logs import JobLogs
from opentinker.shared.security.redact import without_secrets
from opentinker.shared.types.telemetry import MetricPoint

REGISTRY = CollectorRegistry()
LAST = Gauge("opentinker_metric", "Last value of a job's metric", ["job", "source", "name"], registry=REGISTRY)
POINTS = Total("opentinker_metric_points", "Metric points sent", ["source"], registry=REGISTRY)

LEFT_OUT = Total(
    "opentinker_metric_values_left_out", "Values of names beyond a source's most", ["source"], registry=REGISTRY
)
MAX_NAMES = 500
"""Names on /metrics per source of a job, because environments choose names freely. The history keeps all of them."""

SENT_AGAIN = 64
"""Newest points of a source that are sent again to a NATS server that was away."""
CLUSTER = "cluster"
"""Stands in the place of a job in points about what belongs to none."""
REPORT_S = 1.0
FORGET_S = 60.0
"""A job whose meters have not changed for this time, and whose gauges are all 0, is dropped from this process."""


def configure_logging(settings: Settings, service: str, worker: str, logs: JobLogs | None = None) -> None:
    """Configure logging: every line carries service and worker; loops bind job and epoch, group and episode. Secrets
    are removed. Lines bound to a job also go to `logs`. Raises SpecError if a file that should hold a secret does not.

    Lines bound to a job go to `logs` too. Raises SpecError if a file with a secret is no such thing.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=lambda event, **_: orjson.dumps(event, default=str).decode())
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            partial(_redact, settings.secrets(service)),
            *([] if logs is None else [logs.ship]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Tolerant(sys.stdout))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, worker=worker)


def _redact(
    known: Sequence[str], _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    return {name: without_secrets(value, name, known) for name, value in line.items()}


class Tolerant(io.TextIOBase):
    """Drops what a full disk or a closed pipe refuses: no service ends because it cannot say what it does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class MetricSource:
    """Sends one source's metric points of one job: live to subscribers, kept as history by the METRICS stream.

    A NATS server that is killed takes points with it that were on their way or not yet on its disk: when it is back
    the newest ones are sent again, and it keeps those that it lacks.
    """

    def __init__(self, bus: Bus, job: str, source: str, max_names: int = MAX_NAMES, prefix: str = "") -> None:
        """`prefix`: of every name."""
        self._max_names, self._prefix = max_names, prefix
        self._bus, self._job, self._source = bus, job, source
        self._incarnation = uuid.uuid4().hex[:8]
        self._seq = 0
        self._names: set[str] = set()
        self._newest: deque[MetricPoint] = deque(maxlen=SENT_AGAIN)
        bus.on_reconnect.add(self._send_again)

    async def emit(self, step: int, values: dict[str, float]) -> MetricPoint:
        """Values that are not finite are left out: JSON has no word for them."""
        point = MetricPoint(
            job=self._job,
            source=self._source,
            incarnation=self._incarnation,
            seq=self._seq,
            time=time.time(),
            step=step,
            values={self._prefix + name: float(value) for name, value in values.items() if math.isfinite(value)},
        )
        self._seq += 1
        room = self._max_names - len(self._names)
        self._names |= set(sorted(point.values.keys() - self._names)[:room])
        for name, value in point.values.items():
            if name in self._names:
                LAST.labels(self._job, self._source, name).set(value)
            else:
                LEFT_OUT.labels(self._source).inc()
        POINTS.labels(self._source).inc()
        await self.send(point)
        return point

    async def send(self, point: MetricPoint) -> None:
        """A point of this source that was made before, or by an earlier process."""
        self._newest.append(point)
        await self._send(point)

    async def _send(self, point: MetricPoint) -> None:
        msg_id = f"{point.job}/{point.source}/{point.incarnation}/{point.seq}"
        await self._bus.emit(METRIC, point, msg_id, job=self._job, source=self._source)

    async def _send_again(self) -> None:
        for point in list(self._newest):
            await self._send(point)

    def close(self) -> None:
        """The job is over for this process: its last values are no longer shown on /metrics."""
        self._bus.on_reconnect.discard(self._send_again)
        for name in self._names:
            with contextlib.suppress(KeyError):
                LAST.remove(self._job, self._source, name)


class JobMeter:
    """Metrics of one job in this process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Only grow; each is also reported per second, as NAME_per_s."""
        self.before: Counter[str] = Counter()
        """Counted before this process looked: no part of a rate."""
        self.gauges: Counter[str] = Counter()
        self.step = 0
        """Step of the weights that the values belong to, where known."""


class Meters:
    """By job; `CLUSTER` for what belongs to none."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobMeter] = defaultdict(JobMeter)

    def of(self, job: str) -> JobMeter:
        return self.jobs[job]


@dataclass
class _Sent:
    source: MetricSource
    counts: Counter[str]
    gauges: Counter[str]
    at: float
    """Monotonic; rates are since then."""


class Reporter:
    """Consumes meters, produces METRIC: once a second a point for every job of which something has changed."""

    def __init__(self, bus: Bus, source: str, meters: Meters, forget_s: float = FORGET_S) -> None:
        self._forget_s = forget_s
        self._bus, self._source, self._meters = bus, source, meters
        self._sent: dict[str, _Sent] = {}

    async def run(self) -> None:
        await every(REPORT_S, self.report)

    async def report(self) -> None:
        for job, meter in list(self._meters.jobs.items()):
            now = time.monotonic()
            sent = self._sent.get(job)
            if sent is None:
                source = MetricSource(self._bus, job, self._source)
                sent = self._sent[job] = _Sent(source, meter.before.copy(), Counter(), now - REPORT_S)
            if meter.counts != sent.counts or meter.gauges != sent.gauges:
                values: dict[str, float] = {**meter.counts, **meter.gauges}
                elapsed = max(now - sent.at, 1e-3)
                values |= {f"{name}_per_s": (n - sent.counts[name]) / elapsed for name, n in meter.counts.items()}
                sent.counts, sent.gauges, sent.at = meter.counts.copy(), meter.gauges.copy(), now
                await sent.source.emit(meter.step, values)
            elif now - sent.at > self._forget_s and not any(meter.gauges.values()):
                del self._meters.jobs[job]
        for job in self._sent.keys() - self._meters.jobs.keys():
            self._sent.pop(job).source.close()
