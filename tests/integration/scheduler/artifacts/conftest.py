"""Jobs are archived, and what is to go is removed, without the second between two scans."""

from __future__ import annotations

import pytest

POLLS = ("artifacts.archiver", "jobs.cleanup")


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in POLLS:
        monkeypatch.setattr(f"opentinker.services.scheduler.{module}.POLL_S", 0.05)
