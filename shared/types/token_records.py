"""Tokens of an episode one by one, for people to read: of training (`rollouts`) and of evaluations (`transcripts`)."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from opentinker.shared.types.trajectories import Trajectory


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
