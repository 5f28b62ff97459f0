"""Logs with bound ids, metric points on NATS with a counter per source, and the Prometheus registry of the process."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import time
import uuid
from typing import Any, TextIO

import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from opentinker.shared.bus import Bus
from opentinker.shared.config import Settings
from opentinker.shared.subjects import METRIC
from opentinker.shared.types import MetricPoint

REGISTRY = CollectorRegistry()
LAST = Gauge("opentinker_metric", "Last value of a training or rollout metric", ["source", "name"], registry=REGISTRY)
POINTS = Counter("opentinker_metric_points", "Metric points sent", ["source"], registry=REGISTRY)


def configure_logging(settings: Settings, service: str, worker: str) -> None:
    """Every line carries service and worker; loops bind job, group and episode."""
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
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(_Tolerant(sys.stdout)),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, worker=worker)


class _Tolerant(io.TextIOBase):
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
    """Sends one source's metric points of one job: live to subscribers, kept as history by the METRICS stream."""

    def __init__(self, bus: Bus, job: str, source: str) -> None:
        self._bus, self._job, self._source = bus, job, source
        self._incarnation = uuid.uuid4().hex[:8]
        self._seq = 0

    async def emit(self, step: int, values: dict[str, float]) -> MetricPoint:
        """Values that are not finite are left out: JSON has no word for them."""
        point = MetricPoint(
            job=self._job,
            source=self._source,
            incarnation=self._incarnation,
            seq=self._seq,
            time=time.time(),
            step=step,
            values={name: float(value) for name, value in values.items() if math.isfinite(value)},
        )
        self._seq += 1
        for name, value in point.values.items():
            LAST.labels(self._source, name).set(value)
        POINTS.labels(self._source).inc()
        await self._bus.emit(METRIC, point, job=self._job, source=self._source)
        return point
