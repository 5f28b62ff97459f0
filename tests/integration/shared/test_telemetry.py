"""Metric points of services that work for many jobs, and logs that a full disk refuses."""

from __future__ import annotations

import asyncio
import errno
import io

import pytest
import structlog
from prometheus_client import generate_latest

from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.runtime import telemetry
from opentinker.shared.runtime.telemetry import REGISTRY, Meters, MetricSource, Reporter
from opentinker.shared.types.telemetry import MetricPoint
from tests.conftest import until
from tests.support.scheduling import messages


@pytest.fixture
async def heard(bus: Bus) -> list[MetricPoint]:
    """Points of every job of source `env-0`."""
    return await messages(bus, METRIC, job="*", source="env-0")


def prometheus() -> str:
    return generate_latest(REGISTRY).decode()


async def test_point_per_job_comes_when_its_meters_have_moved(bus: Bus, heard: list[MetricPoint]) -> None:
    meters = Meters()
    reporter = Reporter(bus, "env-0", meters)
    meters.of("j-a").counts["env/steps"] += 30
    meters.of("j-b").gauges["env/sessions"] += 2
    await reporter.report()
    await reporter.report()  # nothing new
    await until(lambda: len(heard) == 2)
    first, other = sorted(heard, key=lambda point: point.job)
    assert first.values == {"env/steps": 30.0, "env/steps_per_s": pytest.approx(30.0, rel=0.1)}
    assert other.values == {"env/sessions": 2.0}

    heard.clear()
    meters.of("j-b").gauges["env/sessions"] -= 2
    await reporter.report()
    await until(lambda: heard)
    assert [(point.job, point.seq, point.values) for point in heard] == [("j-b", 1, {"env/sessions": 0.0})]


async def test_what_was_counted_before_is_no_part_of_a_rate(bus: Bus, heard: list[MetricPoint]) -> None:
    meters = Meters()
    meters.of("j-a").counts["scheduler/tickets_issued"] = meters.of("j-a").before["scheduler/tickets_issued"] = 20_000
    meters.of("j-a").gauges["scheduler/running_groups"] = 1
    await Reporter(bus, "env-0", meters).report()
    await until(lambda: heard)
    assert heard[0].values["scheduler/tickets_issued"] == 20_000
    assert heard[0].values["scheduler/tickets_issued_per_s"] == 0.0


async def test_rate_is_since_the_last_report(bus: Bus, heard: list[MetricPoint]) -> None:
    meters = Meters()
    reporter = Reporter(bus, "env-0", meters)
    meters.of("j-a").counts["env/steps"] += 1
    await reporter.report()
    reporter._sent["j-a"].at -= 10.0  # ten silent seconds
    meters.of("j-a").counts["env/steps"] += 50
    await reporter.report()
    await until(lambda: len(heard) == 2)
    assert heard[1].values["env/steps_per_s"] == pytest.approx(5.0, rel=0.05)


async def test_job_without_news_is_forgotten_unless_a_gauge_stands(bus: Bus) -> None:
    meters = Meters()
    reporter = Reporter(bus, "env-0", meters, forget_s=0.0)
    meters.of("j-over").counts["env/steps"] += 1
    meters.of("j-open").gauges["env/sessions"] += 1
    await reporter.report()
    assert 'job="j-over"' in prometheus()
    await asyncio.sleep(0)
    await reporter.report()
    assert set(meters.jobs) == {"j-open"}
    assert 'job="j-over"' not in prometheus() and 'job="j-open"' in prometheus()


async def test_closed_source_is_shown_no_more(bus: Bus) -> None:
    source = MetricSource(bus, "j-closed", "trainer")
    await source.emit(1, {"lr": 0.1})
    assert 'opentinker_metric{job="j-closed",name="lr",source="trainer"} 0.1' in prometheus()
    source.close()
    source.close()
    assert "j-closed" not in prometheus()


async def test_metric_names_on_the_page_are_bounded(bus: Bus) -> None:
    source = MetricSource(bus, "j-wordy", "trainer", max_names=3)
    points = [await source.emit(step, {f"env/{step}{k}": 1.0 for k in range(2)}) for step in range(4)]
    assert [len(point.values) for point in points] == [2, 2, 2, 2]
    assert prometheus().count('job="j-wordy"') == 3
    source.close()
    assert 'job="j-wordy"' not in prometheus()


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_log_line_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    try:
        telemetry.configure_logging(Settings(), "env-worker", "env-0")
        structlog.get_logger().info("hello")
    finally:
        structlog.contextvars.clear_contextvars()
