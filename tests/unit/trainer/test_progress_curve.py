"""The short curve of a job, for lists: of any length of run, some dozens of values."""

from __future__ import annotations

from opentinker.services.trainer.progress_curve import MOST, ProgressCurve


def curve(*steps: dict[str, float]) -> list[float]:
    made = ProgressCurve()
    for step in steps:
        made.add(step)
    return made.values


def test_few_steps_are_all_there_and_others_metrics_are_not() -> None:
    assert curve({"reward/mean": 1.0, "loss": 9.0}, {"entropy": 3.0}, {"reward/mean": 2.0}) == [1.0, 2.0]
    assert curve({"loss": 0.5}) == [0.5] and curve() == []
    assert curve({"reward/mean": 1.0, "loss": 9.0}, {"loss": 9.0}, {"reward/mean": float("nan")}) == [1.0]


def test_many_steps_keep_their_shape_in_a_bounded_number_of_values() -> None:
    for count in (MOST, 10 * MOST, 12_345):
        values = curve(*({"reward/mean": float(step)} for step in range(count)))
        assert MOST // 2 <= len(values) < MOST and values == sorted(values)
        assert values[0] < count / 20 and values[-1] > count * 0.9
