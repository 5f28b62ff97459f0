"""Sweeps look at their jobs without seconds in between."""

from __future__ import annotations

import pytest

from opentinker.services.scheduler import service
from opentinker.services.scheduler.sweeps import controller
from opentinker.services.scheduler.sweeps.controller import SweepController
from opentinker.services.scheduler.sweeps.running_sweep import RunningSweep
from tests.support.scheduling import built_with


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    built_with(monkeypatch, service, SweepController, poll_s=0.05, step_s=0.05)
    built_with(monkeypatch, controller, RunningSweep, late_s=1.0)
