"""Jobs are archived, and what is to go is removed, without the second between two scans."""

from __future__ import annotations

import pytest

from opentinker.services.scheduler import service
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from tests.support.scheduling import built_with

POLL_S = 0.05


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    built_with(monkeypatch, service, Archiver, poll_s=POLL_S)
    built_with(monkeypatch, service, JobCleaner, poll_s=POLL_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are put away as soon as they are over."""
    built_with(monkeypatch, service, Archiver, poll_s=POLL_S, linger_s=0.0)
