"""Checks that the samples of a group begin alike, since a group's baseline compares answers to the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.shared.types.core import Ticket
from opentinker.shared.types.trajectories import Trajectory

WORDS = 10
"""Tokens that are shown of each side, from the first one that differs."""


Decode = Callable[[str, list[int]], str]
"""Decodes tokens of a policy."""


class Opening(NamedTuple):
    """The tokens and images that the player of a seat saw before its first turn."""

    seat: str
    policy: str
    ids: list[int]
    pictures: list[str]
    """The images in them."""


class Sample(NamedTuple):
    """An episode that has ended."""

    number: int
    """Among those that were started for the group."""
    openings: Sequence[Opening]
    """Openings of the seats that acted first; several if they acted at the same time."""
    trajectories: list[Trajectory]
    """One per seat and stream."""


def opening_of(stream: Stream) -> Opening:
    """Return the opening of a stream before its first turn."""
    return Opening(stream.seat, stream.player.name, list(stream.ids), [picture.digest for picture in stream.pictures])


def opening_mismatch_of(ticket: Ticket, ended: Sequence[Sample], seats: SeatMap) -> str:
    """Compare how samples began; where players rotate, among samples in which each plays the same seats."""
    alike: dict[tuple[str, ...], list[Sequence[Opening]]] = {}
    for sample in ended:
        alike.setdefault(seats.turned(ticket.row, sample.number).players, []).append(sample.openings)

    def decode(player: str, ids: list[int]) -> str:
        return seats.named(player).renderer.text(ids)

    return next(filter(None, (opening_mismatch(samples, decode) for samples in alike.values())), "")


def opening_mismatch(samples: Sequence[Sequence[Opening]], text: Decode) -> str:
    """Describe how the first samples with different openings differ; empty if all openings are equal. `samples`: the
    openings of each, in all of which the same policies play the same seats."""
    first = samples[0]
    for place, other in enumerate(samples[1:], start=1):
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


def _named(seats: Sequence[str]) -> str:
    return f"seat {seats[0]!r} acts first" if len(seats) == 1 else f"seats {', '.join(map(repr, seats))} act first"


def _difference(own: Opening, other: Opening, text: Decode) -> str:
    if own.ids == other.ids:
        return f"they show other images ({len(own.pictures)} and {len(other.pictures)})"
    pairs = zip(own.ids, other.ids, strict=False)
    at = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(own.ids), len(other.ids)))
    shown = (repr(text(side.policy, side.ids[at : at + WORDS])) for side in (own, other))
    return f"from token {at} on it is {' and '.join(shown)}"
