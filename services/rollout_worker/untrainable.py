"""Turns that cannot be trained, because the trainer could not compute the logprobs that they were sampled with. Each is
left out alone: its tokens have mask 0, and the transcript has the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.shared.types.env_protocol import SeatPrompt


class Untrainable(Exception):
    """No turn of a seat can be trained."""


def is_restricted(asked: SeatPrompt) -> bool:
    """Return whether the next turn is sampled only among tokens that fit a schema. A forced call is not: its beginning
    is a part of the prompt, and the rest is sampled freely."""
    return asked.guide is not None and asked.guide.call is None


def structure_of(asked: SeatPrompt, renderer: Renderer, stream: Stream) -> str:
    """Return `Sampling.structure` of the next turn."""
    if asked.guide is None or not is_restricted(asked):
        return ""
    return renderer.structure(asked.guide, stream.tools)


def reason_against(completion: Completion, asked: SeatPrompt) -> str:
    """Return why a turn cannot be trained; empty if it can."""
    if is_restricted(asked):
        return "it was sampled under a JSON schema, which the trainer does not know"
    if not all(map(math.isfinite, completion.logprobs)):
        return "the engine gave no finite logprob for one of its tokens"
    return ""


def trained_streams(streams: Sequence[Stream]) -> list[Stream]:
    """Return those of these streams, all with turns, that have tokens to be trained. What the others have earned is
    moved to the last turn of the seat in one of them. Raises Untrainable."""
    trained = [stream for stream in streams if stream.spans]
    for stream in streams:
        if stream.spans:
            continue
        own = [other for other in trained if other.seat == stream.seat]
        if not own:
            whose = f"of seat {stream.seat!r} " if stream.seat else ""
            raise Untrainable(f"no turn {whose}can be trained: {stream.turns[-1].untrainable}")
        max(own, key=lambda other: other.turns[-1].number).take_rewards(stream)
    return trained
