"""Invariants of the shared types."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.shared.types.core import Ending, JobState, StopReason, WeightVersion
from opentinker.shared.types.trajectories import Group, Span, Turn
from tests.support.factories import V0, make_group, make_trajectory, trajectory_of


def i32(*values: int) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def f32(*values: float) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def turn(start: int, end: int, reward: float = 1.0) -> Turn:
    return Turn(start=start, end=end, stop=StopReason.EOS, reward=reward)


# Valid: ids [5 6 7 8 9 1], mask [0 0 0 1 1 1].
INCONSISTENT: dict[str, dict[str, Any]] = {
    "ids cut": {"ids_T": i32(1, 2, 3, 4, 5)},
    "ids not whole": {"ids_T": b"123"},
    "negative id": {"ids_T": i32(5, 6, 7, -1, 9, 1)},
    "mask too long": {"mask_T": bytes([0, 0, 0, 1, 1, 1, 1])},
    "mask of twos": {"mask_T": bytes([0, 0, 0, 2, 2, 2])},
    "logprobs cut": {"logprobs_T": f32(0, 0, 0, -1, -1)},
    "logprob of the prompt": {"logprobs_T": f32(0, -1, 0, -1, -1, -1)},
    "logprob not a number": {"logprobs_T": f32(0, 0, 0, -1, float("nan"), -1)},
    "logprob infinite": {"logprobs_T": f32(0, 0, 0, -1, float("-inf"), -1)},
    "reference logprobs cut": {"ref_logprobs_T": f32(0, 0, 0, -1, -1)},
    "teacher logprobs cut": {"teacher_logprobs_T": f32(0, 0, 0, -1, -1)},
    "teacher logprob of the prompt": {"teacher_logprobs_T": f32(-1, 0, 0, -1, -1, -1)},
    "values cut": {"values_T": f32(0, 0, 0, 1, 1)},
    "value of the prompt": {"values_T": f32(1, 0, 0, 1, 1, 1)},
    "value not a number": {"values_T": f32(0, 0, 0, 1, float("nan"), 1)},
    "reference logprob of the prompt": {"ref_logprobs_T": f32(-1, 0, 0, -1, -1, -1)},
    "reference logprob not a number": {"ref_logprobs_T": f32(0, 0, 0, -1, -1, float("nan"))},
    "no span": {"spans": []},
    "span too short": {"spans": [Span(3, 5, V0)]},
    "span into the prompt": {"spans": [Span(2, 6, V0)]},
    "span beyond the end": {"spans": [Span(3, 7, V0)]},
    "span before the start": {"spans": [Span(-3, 6, V0)]},
    "spans overlap": {"spans": [Span(3, 5, V0), Span(4, 6, V0)]},
    "spans out of order": {"spans": [Span(5, 6, V0), Span(3, 5, V0)]},
    "empty span of an old version": {"spans": [Span(3, 3, WeightVersion(0, 0)), Span(3, 6, V0)]},
    "nothing sampled": {"mask_T": bytes(6), "logprobs_T": f32(*[0] * 6), "spans": []},
    "empty": {"ids_T": b"", "mask_T": b"", "logprobs_T": b"", "spans": [], "turns": []},
    "turn into the prompt": {"turns": [turn(2, 6)]},
    "turn beyond the end": {"turns": [turn(3, 9)]},
    "turns out of order": {"turns": [turn(4, 6), turn(3, 4, 0.0)]},
    "reward not a number": {"reward": float("nan")},
    "turn reward not a number": {"turns": [turn(3, 6, float("nan"))]},
    "reward not the sum": {"turns": [turn(3, 4, 1.0), turn(4, 6, 1.0)]},
    "metric not a number": {"metrics": {"exact": float("inf")}},
}


def test_valid_trajectories_pass() -> None:
    make_trajectory().check()
    make_trajectory(versions=[V0, WeightVersion(1, 1)]).check()
    make_trajectory(ref_logprobs_T=f32(0, 0, 0, -1, -2, -3)).check()
    two = make_trajectory(turns=[turn(3, 5, 0.1), turn(5, 6, 0.2)])
    msgspec.structs.replace(two, reward=0.1 + 0.2).check()


@pytest.mark.parametrize("change", INCONSISTENT)
def test_inconsistent_trajectory_is_refused(change: str) -> None:
    broken = msgspec.structs.replace(make_trajectory(), **INCONSISTENT[change])
    with pytest.raises(ValueError):
        broken.check()


@given(st.data())
def test_any_single_flip_of_the_mask_is_refused(data: st.DataObject) -> None:
    good = make_trajectory()
    place = data.draw(st.integers(0, len(good.mask_T) - 1))
    mask = bytearray(good.mask_T)
    mask[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        msgspec.structs.replace(good, mask_T=bytes(mask)).check()


def test_a_sample_has_a_trajectory_per_seat_and_stream() -> None:
    """And its turns say in which order they were played across the streams."""
    places = [(seat, stream) for seat in "ab" for stream in ("", "s")]
    views = [
        make_trajectory(index=0, seat=seat, stream=stream, reward=reward, number=number)
        for number, ((seat, stream), reward) in enumerate(zip(places, (1.0, 2.0, 0.0, 0.5), strict=True))
    ]
    group = msgspec.structs.replace(make_group(size=1), trajectories=views)
    group.check()
    assert (group.samples, group.seats) == (1, {"a": [[0, 1]], "b": [[2, 3]]})
    assert group.rewards == {"a": [3.0], "b": [0.5]}
    with pytest.raises(ValueError, match="one trajectory per seat and stream"):
        msgspec.structs.replace(group, trajectories=[*views, views[0]]).check()
    views[1] = make_trajectory(index=0, seat="a", stream="s", number=0)
    with pytest.raises(ValueError, match="numbered in order of play"):
        msgspec.structs.replace(group, trajectories=views).check()
    backwards = trajectory_of([5, 6, 7, 8], [0, 1, 0, 1], numbers=[3, 1])
    with pytest.raises(ValueError, match="numbered in order of play"):
        backwards.check()


def test_rewards_are_equal_seat_by_seat_and_sample_by_sample() -> None:
    def match(*rewards: tuple[int, str, float]) -> Group:
        made = [make_trajectory(index=index, seat=seat, reward=reward) for index, seat, reward in rewards]
        return msgspec.structs.replace(make_group(), trajectories=made)

    assert match((0, "a", 1.0), (0, "b", -1.0), (1, "a", 1.0), (1, "b", -1.0)).equal
    assert not match((0, "a", 1.0), (0, "b", -1.0), (1, "a", -1.0), (1, "b", 1.0)).equal
    assert match((0, "a", 1.0), (0, "b", -1.0), (1, "a", 1.0)).equal
    assert match((0, "a", 0.1 + 0.2), (1, "a", 0.3)).equal, "they differ by the rounding of a sum"
    assert match((0, "a", 0.1 + 0.2 - 0.3), (1, "a", 0.0)).equal
    assert not match((0, "a", 0.3), (1, "a", 0.3 + 1e-9)).equal


def test_group_is_numbered_from_zero() -> None:
    make_group(size=3).check()
    for bad in ([], [make_trajectory(index=1)], [make_trajectory(index=0), make_trajectory(index=2)]):
        with pytest.raises(ValueError, match="numbered"):
            msgspec.structs.replace(make_group(), trajectories=bad).check()
    broken: Group = make_group(mask_T=b"")
    with pytest.raises(ValueError, match="length"):
        broken.check()


def test_oldest_version_counts_epoch_before_step() -> None:
    versions = [WeightVersion(2, 1), WeightVersion(1, 9), WeightVersion(2, 0)]
    assert make_trajectory(versions=versions).oldest == WeightVersion(1, 9)
    assert make_group(versions=versions).oldest == WeightVersion(1, 9)


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_weight_version_survives_its_text(epoch: int, step: int) -> None:
    version = WeightVersion(epoch, step)
    assert WeightVersion.parse(str(version)) == version


def test_endings_and_states_are_told_apart() -> None:
    assert {e for e in Ending if not e.failed} == {"env_done", "max_turns", "max_tokens", "context"}
    assert {s for s in JobState if s.final} == {"succeeded", "failed", "cancelled"}


def test_arrays_are_read_only_views() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make_trajectory().ids[0] = 1
