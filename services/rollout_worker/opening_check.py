"""Whether the samples of a group began alike: a group's baseline compares answers to one and the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentinker.shared.types.trajectories import Trajectory

WORDS = 10
"""Tokens that are shown of each side, from the first one that differs."""


def opening_mismatch(samples: Sequence[Sequence[Trajectory]], text: Callable[[list[int]], str]) -> str:
    """Describe how the first samples with different openings differ; empty if all openings are equal. `samples`: the
    trajectories of each; `text` decodes tokens."""
    first = _opening(samples[0])
    for place, sample in enumerate(samples[1:], start=1):
        other = _opening(sample)
        if other == first:
            continue
        (seat, ids, pictures), (other_seat, other_ids, other_pictures) = first, other
        if seat != other_seat:
            what = f"seat {seat!r} acts first in one, {other_seat!r} in the other"
        elif ids == other_ids:
            what = f"they show other images ({len(pictures)} and {len(other_pictures)})"
        else:
            pairs = zip(ids, other_ids, strict=False)
            at = next((n for n, (own, their) in enumerate(pairs) if own != their), min(len(ids), len(other_ids)))
            shown = (repr(text(side[at : at + WORDS])) for side in (ids, other_ids))
            what = f"from token {at} on it is {' and '.join(shown)}"
        return f"samples 0 and {place} began differently: {what}"
    return ""


def _opening(sample: Sequence[Trajectory]) -> tuple[str, list[int], list[str]]:
    """Return the opening of the stream that acted first: its seat, the tokens before its first sampled one, and the
    images in them."""
    first = min(sample, key=lambda trajectory: trajectory.turns[0].number)
    end = first.turns[0].start
    pictures = [picture.digest for picture in first.pictures if picture.runs and picture.runs[0][0] < end]
    return first.seat, first.ids[:end].tolist(), pictures
