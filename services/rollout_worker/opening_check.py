"""Checks that the samples of a group begin alike, since a group's baseline compares answers to the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import Ticket
from opentinker.shared.types.trajectories import Trajectory

WORDS = 10
"""Tokens that are shown of each side, from the first one that differs."""


Decode = Callable[[str, list[int]], str]
"""Decodes tokens of a policy."""


def opening_mismatch_of(ticket: Ticket, ended: Sequence[Sequence[Trajectory]], seats: SeatMap) -> str:
    """Compare how samples began; where players rotate, those in which everybody plays the same seats."""
    alike: dict[tuple[str, ...], list[Sequence[Trajectory]]] = {}
    for sample in ended:
        alike.setdefault(seats.turned(ticket.row, sample[0].index).players, []).append(sample)

    def decode(player: str, ids: list[int]) -> str:
        return seats.named(player).renderer.text(ids)

    return next(filter(None, (opening_mismatch(samples, decode) for samples in alike.values())), "")


def opening_mismatch(samples: Sequence[Sequence[Trajectory]], text: Decode) -> str:
    """Describe how the first samples with different openings differ; empty if all openings are equal. `samples`: the
    trajectories of each, in all of which the same policies play the same seats."""
    first = _openings(samples[0])
    for place, sample in enumerate(samples[1:], start=1):
        other = _openings(sample)
        if other == first:
            continue
        seats, other_seats = ([opening.seat for opening in each] for each in (first, other))
        if seats != other_seats:
            named, other_named = (_named(each) for each in (seats, other_seats))
            what = f"{named} in one, {other_named} in the other"
        else:
            pairs = zip(first, other, strict=True)
            own, their = next(pair for pair in pairs if pair[0] != pair[1])
            what = (f"for seat {own.seat!r} " if len(first) > 1 else "") + _difference(own, their, text)
        return f"samples 0 and {place} began differently: {what}"
    return ""


class _Opening(NamedTuple):
    seat: str
    policy: str
    ids: list[int]
    """The tokens before the first sampled one."""
    pictures: list[str]
    """The images in them."""


def _openings(sample: Sequence[Trajectory]) -> list[_Opening]:
    """Return the opening of the stream that acted first, or of all that did so at the same time."""
    began = min(trajectory.turns[0].number for trajectory in sample)
    return [_opening(trajectory) for trajectory in sample if trajectory.turns[0].number == began]


def _opening(trajectory: Trajectory) -> _Opening:
    end = trajectory.turns[0].start
    pictures = [picture.digest for picture in trajectory.pictures if picture.runs and picture.runs[0][0] < end]
    return _Opening(trajectory.seat, trajectory.policy, trajectory.ids[:end].tolist(), pictures)


def _named(seats: Sequence[str]) -> str:
    return f"seat {seats[0]!r} acts first" if len(seats) == 1 else f"seats {', '.join(map(repr, seats))} act first"


def _difference(own: _Opening, other: _Opening, text: Decode) -> str:
    if own.ids == other.ids:
        return f"they show other images ({len(own.pictures)} and {len(other.pictures)})"
    pairs = zip(own.ids, other.ids, strict=False)
    at = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(own.ids), len(other.ids)))
    shown = (repr(text(side.policy, side.ids[at : at + WORDS])) for side in (own, other))
    return f"from token {at} on it is {' and '.join(shown)}"
