"""Detection of dead workers by the watcher's own clock."""

from __future__ import annotations

from opentinker.shared.runtime.liveness import HeartbeatWatch
from opentinker.shared.types.core import Pool
from opentinker.shared.types.workers import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def beat(number: int, *, id: str = "w", incarnation: str = "1", ttl_s: float = 5.0) -> Heartbeat:
    return Heartbeat(id=id, incarnation=incarnation, pool=Pool.ROLLOUT, host="h", pid=1, number=number, ttl_s=ttl_s)


def watched(clock: Clock, watch: HeartbeatWatch, seconds: float, *beats: Heartbeat) -> list[str]:
    """Names of the silent after looks every half a second."""
    found: list[Heartbeat] = []
    for _ in range(round(seconds / 0.5)):
        clock.now += 0.5
        found = watch.silent(beats)
    return [one.id for one in found]


def test_worker_whose_number_stands_still_for_its_time_is_silent() -> None:
    clock = Clock()
    watch = HeartbeatWatch(clock)
    assert watch.silent([beat(7)]) == []
    assert watched(clock, watch, 4.5, beat(7), beat(3, id="patient", ttl_s=60.0)) == []
    assert watched(clock, watch, 0.5, beat(7), beat(3, id="patient", ttl_s=60.0)) == ["w"]
    assert watched(clock, watch, 0.5, beat(8)) == [], "it beats again"


def test_any_other_number_or_incarnation_is_a_beat() -> None:
    clock = Clock()
    watch = HeartbeatWatch(clock)
    watch.silent([beat(7)])
    assert watched(clock, watch, 4.5, beat(7)) == []
    assert watched(clock, watch, 4.5, beat(7, incarnation="2")) == []
    assert watched(clock, watch, 4.5, beat(6, incarnation="2")) == []
    assert watched(clock, watch, 1.0, beat(6, incarnation="2")) == ["w"], "counted from the look that saw it"


def test_a_time_without_looks_counts_for_half_a_patience() -> None:
    """It was stopped, or Redis was away, and nobody could beat. But if looks are always rare the dead are found too."""
    clock = Clock()
    watch = HeartbeatWatch(clock)
    watch.silent([beat(7)])
    assert watched(clock, watch, 2.0, beat(7)) == []
    clock.now += 3600.0
    assert watch.silent([beat(7)]) == []
    assert watched(clock, watch, 4.5, beat(8)) == [], "it had only not been able to"
    clock.now += 3600.0
    assert [one.id for one in watch.silent([beat(8)])] == ["w"]


def test_beats_of_the_release_before_numbers_are_left_alone() -> None:
    clock = Clock()
    watch = HeartbeatWatch(clock)
    old = beat(0, id="old", ttl_s=0.0)
    assert watch.silent([old, beat(7)]) == []
    assert watched(clock, watch, 60.0, old, beat(7)) == ["w"]


def test_worker_that_was_away_is_watched_anew() -> None:
    clock = Clock()
    watch = HeartbeatWatch(clock)
    watch.silent([beat(7)])
    assert watched(clock, watch, 4.5, beat(7)) == []
    watch.silent([])
    assert watched(clock, watch, 4.5, beat(7)) == []
