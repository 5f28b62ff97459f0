"""Sweeps look at their jobs without seconds in between."""

from __future__ import annotations

import pytest

from opentinker.services.scheduler.sweeps import controller, running_sweep


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "POLL_S", 0.05)
    monkeypatch.setattr(controller, "STEP_S", 0.05)
    monkeypatch.setattr(running_sweep, "LATE_S", 1.0)
