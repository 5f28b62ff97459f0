"""Tokens of an episode one by one, and its messages in the order of play, for people to read: of training (`rollouts`)
and of evaluations (`transcripts`)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from opentinker.shared.types.core import Message, WeightVersion
from opentinker.shared.types.trajectories import Span, Trajectory, Turn

EPISODE_IMAGES, STEP_IMAGES = 512 * 1024, 8 * 1024 * 1024
"""Bytes of the images that are kept of an episode, and of all episodes of a step together."""
ENCODED = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
"""How PNG and JPEG begin."""


class KeptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens of an episode in one context, column by column."""

    text: list[str]
    ids: list[int]
    mask: list[int]
    """1: sampled by the policy."""
    logprobs: list[float]
    """Log-probabilities under the sampling distribution."""
    advantages: list[float] | None = None
    """Advantage of each token in a training step."""
    versions: list[tuple[int, int, str]]
    """First token, the one after the last, weights."""
    left_out: int


def tokens_of(view: Trajectory, pieces: list[str], advantages: npt.NDArray[np.float64] | None = None) -> KeptTokens:
    """`pieces`: the text of each of the first tokens; `advantages`: of each token that was sampled."""
    kept = len(pieces)
    spread = None
    if advantages is not None:
        spread = np.zeros(len(view.mask))
        spread[view.mask.astype(bool)] = advantages
    return KeptTokens(
        text=pieces,
        ids=view.ids[:kept].tolist(),
        mask=view.mask[:kept].tolist(),
        logprobs=view.logprobs[:kept].astype(np.float64).round(4).tolist(),
        advantages=None if spread is None else spread[:kept].round(4).tolist(),
        versions=[(span.start, min(span.end, kept), str(span.version)) for span in view.spans if span.start < kept],
        left_out=len(view.mask) - kept,
    )


def as_said(message: Message) -> dict[str, Any]:
    """Return a message of a transcript as text; the result of a tool call with the tool's name and the call's time."""
    called = {"tool": message.name} if message.name else {}
    timed = {} if message.call_s is None else {"call_ms": round(1000 * message.call_s, 3)}
    shown = {"images": [image.digest for image in message.images]} if message.images else {}
    return {"role": message.role, "content": message.text, **called, **timed, **shown}


def sampled_by(turn: Turn, spans: Iterable[Span]) -> list[WeightVersion]:
    """Return the versions that sampled the tokens of a turn. `spans`: of its trajectory."""
    return sorted({span.version for span in spans if span.start < turn.end and turn.start < span.end})


def images_within(messages: Iterable[Message], images: Mapping[str, bytes], episodes: int) -> dict[str, bytes]:
    """Return the first images that messages of a transcript refer to, up to its share with `episodes` kept episodes.
    `images`: by digest."""
    left = min(EPISODE_IMAGES, STEP_IMAGES // max(1, episodes))
    kept: dict[str, bytes] = {}
    for digest in dict.fromkeys(image.digest for message in messages for image in message.images):
        data = images.get(digest, b"")
        if data.startswith(ENCODED) and len(data) <= left:
            kept[digest] = data
            left -= len(data)
    return kept


def as_base64(images: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """Return the field `images` of an episode's record, which has none without images."""
    text = {digest: base64.b64encode(data).decode() for digest, data in images.items()}
    return {"images": text} if text else {}


def order_of_play(views: Sequence[tuple[Sequence[Turn], int]]) -> list[tuple[int, int]]:
    """Return the messages of a whole episode as one conversation, each by the place of its view and its own in there.

    Seats come in the order of their turns. Before its words a seat has what it was shown since its last turn; what it
    was shown after its last one is at the end. `views`: the turns and the number of messages of each, which may leave
    out the end.
    """
    shown = [0] * len(views)
    lengths = [length for _, length in views]
    order: list[tuple[int, int]] = []

    def show(place: int, end: int) -> None:
        order.extend((place, message) for message in range(shown[place], end))
        shown[place] = max(shown[place], end)

    acts = [(place, turn) for place, (turns, _) in enumerate(views) for turn in turns]
    for place, turn in sorted(acts, key=lambda act: act[1].number):
        show(place, lengths[place] if turn.message is None else min(turn.message + 1, lengths[place]))
    for place, length in enumerate(lengths):
        show(place, length)
    return order
