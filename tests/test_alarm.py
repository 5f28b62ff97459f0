"""The alarm hears a slope, not a level, and outliers do not move it."""

from __future__ import annotations

import numpy as np
import pytest

from opentinker.services.trainer.alarm import WINDOW, SlopeAlarm, grows, theil_sen

NOISE = np.random.default_rng(0).normal(size=WINDOW)
TIME = np.arange(WINDOW)


def test_slope_is_the_median_of_all_pairs() -> None:
    values = [1.0, 2.0, 4.0, 100.0]
    pairs = sorted((values[j] - values[i]) / (j - i) for i in range(4) for j in range(i + 1, 4))
    assert list(theil_sen(values)) == pytest.approx([(pairs[2] + pairs[3]) / 2, 1.0])
    assert list(theil_sen(0.5 * TIME + 3)) == pytest.approx([0.5, 1.0])


def test_a_steady_rise_is_heard_and_a_high_level_is_not() -> None:
    assert grows(0.01 + 0.001 * TIME + 0.001 * NOISE)
    assert not grows(0.5 + 0.01 * NOISE)
    assert not grows(0.5 - 0.01 * TIME)


def test_outliers_a_single_step_and_rounding_are_not_heard() -> None:
    spiky = 0.01 + 0.0005 * NOISE
    spiky[-4:] = 5.0
    assert not grows(spiky)
    assert not grows(np.where(TIME < 5, 0.0, 0.02) + 0.0005 * NOISE), "drift begins when the first lag does"
    assert not grows(1e-7 * (1 + TIME))


def test_it_rings_once_and_stops_when_the_slope_is_gone() -> None:
    alarm = SlopeAlarm()
    began = [alarm.look({"mismatch/mean": 0.001 * (step + 1)}) for step in range(WINDOW + 5)]
    assert began == [[]] * (WINDOW - 1) + [["mismatch/mean"]] + [[]] * 5
    assert alarm.ringing == {"mismatch/mean"}
    for _ in range(WINDOW):
        alarm.look({"mismatch/mean": 0.045, "drift/mean": 0.1})
    assert not alarm.ringing
    assert alarm.look({"entropy": 1.0}) == [], "a step without the metric leaves the window as it is"
