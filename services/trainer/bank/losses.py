"""Data of a forward_backward command and its loss, which is its tenant's alone.

L = scale * sum over the learned tokens m of weight_m * l_m: never divided by anything of the pass that the rows share
with other tenants'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opentinker.services.trainer.algorithm import losses
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.pass_part import PassOptions, Scores
from opentinker.services.trainer.data.chat import Tokens
from opentinker.shared.nn.layout import Layout, layout

F32 = npt.NDArray[np.float32]
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 3.0},
    "dro": {"beta": 0.01},
}
"""Options of each loss with their defaults; the formulas are in algorithm/losses.py."""


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. M: its learned tokens."""

    tokens: Tokens
    weights_M: F32 | None = None
    """Factor of each token in the loss; without them 1."""
    behaviour_M: F32 | None = None
    """Log-probabilities under the policy that sampled; every loss but cross_entropy needs them."""
    advantages_M: F32 | None = None
    """Needed likewise."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    name: LossName = "cross_entropy"
    options: Mapping[str, float] = {}
    """Those in OPTIONS that differ from the default."""
    scale: float = 1.0
    """Factor of the whole sum, such as 1 / tokens for a mean."""
    temperature: float = 1.0
    """Temperature of the distribution whose log-probabilities are given."""


def check_loss(loss: Loss) -> None:
    """Raise Refused for an unknown loss or option, and for a number that is not finite."""
    if loss.name not in OPTIONS:
        raise Refused(f"loss {loss.name!r} is unknown; choose one of {', '.join(get_args(LossName))}")
    options = OPTIONS[loss.name]
    for name, value in loss.options.items():
        if name not in options:
            raise Refused(f"loss {loss.name} has no option {name!r}; it has {', '.join(options) or 'none'}")
        if not 0 <= value < float("inf"):
            raise Refused(f"option {name} = {value} of loss {loss.name}: must be 0 or more, and finite")
    if not abs(loss.scale) < float("inf"):
        raise Refused(f"scale = {loss.scale}: must be finite")
    if not 0 < loss.temperature < float("inf"):
        raise Refused(f"temperature = {loss.temperature}: must be above 0, and finite")


def check_data(data: Sequence[Datum], loss: Loss, vocabulary: int) -> None:
    """Raise Refused, naming the datum, for data that would fail in the pass or spoil it."""
    if not data:
        raise Refused("the command has no data")
    for number, datum in enumerate(data):
        ids_T, learned_T = datum.tokens.ids_T, datum.tokens.learned_T
        if len(ids_T) != len(learned_T):
            raise Refused(f"datum {number} has {len(ids_T)} tokens and a mask of {len(learned_T)}")
        if not learned_T.any() or learned_T[0]:
            problem = "learns its first token, which nothing predicts" if learned_T.any() else "has no learned token"
            raise Refused(f"datum {number} {problem}")
        if ids_T.min() < 0 or ids_T.max() >= vocabulary:
            raise Refused(f"datum {number} has token ids outside of the vocabulary of {vocabulary}")
        needed = ("behaviour_M", "advantages_M") if loss.name != "cross_entropy" else ()
        for field in ("weights_M", "behaviour_M", "advantages_M"):
            _check_field(number, field, getattr(datum, field), int(learned_T.sum()), needed=field in needed)


def _check_field(number: int, field: str, values: F32 | None, count: int, *, needed: bool) -> None:
    what = {"weights_M": "weights", "behaviour_M": "log-probabilities", "advantages_M": "advantages"}[field]
    if values is None:
        if needed:
            raise Refused(f"datum {number} has no {what}, which this loss needs")
        return
    if values.shape != (count,):
        raise Refused(f"datum {number} has {count} learned tokens and {what} of shape {values.shape}")
    if not np.isfinite(values).all():
        raise Refused(f"datum {number} has {what} that are not finite")


@dataclass(frozen=True)
class DataPart:
    """Data of one command in a pass; a `PassPart`."""

    data: Sequence[Datum]
    command_loss: Loss

    @cached_property
    def plan(self) -> Layout:
        return layout(
            [datum.tokens.ids_T for datum in self.data],
            [datum.tokens.learned_T for datum in self.data],
            temperatures=[self.command_loss.temperature] * len(self.data),
        )

    @property
    def options(self) -> PassOptions:
        return PassOptions(temperature=self.command_loss.temperature)

    @cached_property
    def counts(self) -> list[int]:
        return [int(datum.tokens.learned_T.sum()) for datum in self.data]

    def loss(self, scores: Scores) -> Tensor:
        logprobs_M = scores.logprobs_M
        loss_M = _token_losses(logprobs_M, self.data, self.command_loss)
        if any(datum.weights_M is not None for datum in self.data):
            loss_M = loss_M * _column(self.data, "weights_M", logprobs_M.device)
        return loss_M.sum() * self.command_loss.scale


def _token_losses(logprobs_M: Tensor, data: Sequence[Datum], loss: Loss) -> Tensor:
    if loss.name == "cross_entropy":
        return -logprobs_M
    options: dict[str, Any] = {**OPTIONS[loss.name], **loss.options}
    formula: Any = getattr(losses, loss.name)
    device = logprobs_M.device
    behaviour_M, advantages_M = _column(data, "behaviour_M", device), _column(data, "advantages_M", device)
    found: losses.PolicyLoss = formula(logprobs_M, behaviour_M, advantages_M, **options)
    return found.loss_M


def _column(data: Sequence[Datum], field: str, device: torch.device) -> Tensor:
    """Return a field of all data one after another; weights that a datum leaves out are 1."""
    parts = [
        np.ones(int(datum.tokens.learned_T.sum())) if values is None else values
        for datum in data
        for values in (getattr(datum, field),)
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32, copy=False)).to(device)
