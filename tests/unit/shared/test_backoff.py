"""Delays of retry loops."""

from __future__ import annotations

from opentinker.shared.backoff import Backoff, exponential_delay_s


def test_delays_double_up_to_the_limit_with_jitter_of_half() -> None:
    backoff = Backoff(0.1, 0.5)
    for expected in (0.1, 0.2, 0.4, 0.5, 0.5):
        assert backoff.next_s == expected
        assert 0.5 * expected <= backoff.delay_s() <= 1.5 * expected
    backoff.reset()
    assert backoff.next_s == 0.1
    assert len({Backoff(0.1, 0.5).delay_s() for _ in range(9)}) > 1


def test_a_day_of_failures_does_not_overflow() -> None:
    delays = [exponential_delay_s(failures, 5.0, 30.0) for failures in (1, 2, 3, 4, 5000)]
    assert delays == [5.0, 10.0, 20.0, 30.0, 30.0]
