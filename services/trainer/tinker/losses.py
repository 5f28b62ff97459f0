"""Losses of the Tinker API: data of a forward_backward -> units of a bank's passes, and what is answered of them.

L = sum over all data and places m of factor_m * l_m, never a mean. The factor is `weights` of cross_entropy and `mask`
of the others. M = N * K places of a datum: K targets at each of N positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opentinker.services.trainer.algorithm import losses
from opentinker.services.trainer.algorithm.advantages import MAX_LOG_RATIO
from opentinker.services.trainer.bank.limits import BankLimits, Refused
from opentinker.services.trainer.bank.pass_part import Scores, Unit
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.types.tinker import LARGEST_OPTION, Datum

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.01},
}
"""Options of each loss with their defaults. Thresholds are ratios, not distances from 1."""
MAX_TARGETS = 64
"""Largest K."""
SHARED_PREFIX = 16
"""Equal first tokens from which neighbours are computed together, these tokens once."""


@dataclass(frozen=True)
class Columns:
    """A datum's arrays. `behaviour_M` and `advantages_M` are empty for cross_entropy."""

    ids_N: I32
    targets_M: I32
    width: int
    factor_M: F32
    behaviour_M: F32
    advantages_M: F32


@dataclass(frozen=True)
class DataLoss:
    """A loss with its options."""

    name: str
    options: Mapping[str, float]

    @property
    def is_policy_loss(self) -> bool:
        """Return whether it compares with the policy that sampled."""
        return self.name != "cross_entropy"

    def of_places(self, logprobs_M: Tensor, behaviour_M: Tensor, advantages_M: Tensor) -> Tensor:
        """Return the loss of each place; the formulas are in algorithm/losses.py."""
        if not self.is_policy_loss:
            return -logprobs_M
        options = dict(self.options)
        if "clip_low_threshold" in options:
            low, high = options["clip_low_threshold"], options["clip_high_threshold"]
            options = {"clip_low": 1.0 - low, "clip_high": high - 1.0}
        formula: Callable[..., losses.PolicyLoss] = getattr(losses, self.name)
        return formula(logprobs_M, behaviour_M, advantages_M, **options).loss_M


def find_loss(name: str, options: Mapping[str, float]) -> DataLoss:
    """Raises Refused for an unknown loss or option, and for a number that it has no meaning for."""
    if name not in OPTIONS:
        raise Refused(f"loss_fn {name!r} is unknown; choose one of {', '.join(OPTIONS)}")
    defaults = OPTIONS[name]
    for option, value in options.items():
        if option not in defaults:
            raise Refused(f"loss_fn {name} has no option {option!r}; it has {', '.join(defaults) or 'none'}")
        if not 0 <= value <= LARGEST_OPTION:
            raise Refused(f"option {option} = {value} of loss_fn {name}: must be 0 to {LARGEST_OPTION:g}")
    chosen = {**defaults, **options}
    low, high = chosen.get("clip_low_threshold", 0.0), chosen.get("clip_high_threshold", math.inf)
    if low > high:
        raise Refused(
            f"option clip_low_threshold = {low} of loss_fn {name}: must be at most clip_high_threshold, {high}"
        )
    return DataLoss(name, chosen)


def read_data(data: Sequence[Datum], loss: DataLoss, vocabulary: int, limits: BankLimits) -> list[Columns]:
    """Return the arrays of data. Raises Refused, naming the datum, for what would fail in the pass or spoil it."""
    if not data:
        raise Refused("the request has no data")
    return [_Reader(number, datum, loss, vocabulary, limits).columns() for number, datum in enumerate(data)]


@dataclass(frozen=True)
class _Reader:
    number: int
    datum: Datum
    loss: DataLoss
    vocabulary: int
    limits: BankLimits

    def columns(self) -> Columns:
        ids_N = self._ids("tokens", self.datum.tokens)
        self._require_size(len(ids_N))
        targets_M, M = self._ids("targets", self.datum.targets), len(ids_N) * self.datum.width
        if len(targets_M) != M:
            raise self._refused(
                f"has {len(targets_M)} targets; it needs {self.datum.width} at each of {len(ids_N)} tokens"
            )
        none = np.empty(0, np.float32)
        ones = np.ones(M, np.float32)
        if not self.loss.is_policy_loss:
            return Columns(ids_N, targets_M, self.datum.width, self._numbers("weights", M, ones), none, none)
        if self.datum.weights:
            raise self._refused(
                f"has weights, which loss_fn {self.loss.name} does not use; leave them out, or send a mask"
            )
        return Columns(
            ids_N, targets_M, self.datum.width, self._numbers("mask", M, ones),
            self._numbers("logprobs", M), self._numbers("advantages", M),
        )  # fmt: skip

    def _require_size(self, tokens: int) -> None:
        if not tokens:
            raise self._refused("has no tokens")
        if tokens > (most := self.limits.datum_tokens):
            raise self._refused(f"has {tokens} tokens, and at most {most} are allowed; shorten it")
        if not 0 < self.datum.width <= MAX_TARGETS:
            raise self._refused(f"has {self.datum.width} targets for each token; choose 1 to {MAX_TARGETS}")

    def _ids(self, field: str, data: bytes) -> I32:
        if len(data) % 4:
            raise self._refused(f"has {field} of {len(data)} bytes, which are no int32 numbers")
        ids = np.frombuffer(data, "<i4")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary):
            odd = int(ids.min() if ids.min() < 0 else ids.max())
            raise self._refused(f"has {field} outside of the vocabulary of {self.vocabulary}, such as {odd}")
        return ids

    def _numbers(self, field: str, count: int, default: F32 | None = None) -> F32:
        data: bytes = getattr(self.datum, field)
        if not data:
            if default is None:
                raise self._refused(f"has no {field}, which loss_fn {self.loss.name} needs")
            return default
        if len(data) != 4 * count:
            raise self._refused(f"has {len(data) / 4:g} {field} and {count} targets; send one for each target")
        numbers = np.frombuffer(data, "<f4")
        if not np.isfinite(numbers).all():
            raise self._refused(f"has numbers that are not finite in its {field}")
        return numbers

    def _refused(self, problem: str) -> Refused:
        return Refused(f"datum {self.number} {problem}")


def units_of(data: Sequence[Columns], loss: DataLoss, most: int) -> list[Unit]:
    """Return the units of a pass, data in their order. `most`: tokens of a unit with several data."""
    groups: list[list[Columns]] = []
    for before, datum in pairwise([None, *data]):
        assert datum is not None
        if before is not None and _begin_alike(before, datum) and _tokens([*groups[-1], datum]) <= most:
            groups[-1].append(datum)
        else:
            groups.append([datum])
    return [_Group(group, loss).unit for group in groups]


def _begin_alike(one: Columns, other: Columns) -> bool:
    return (
        min(len(one.ids_N), len(other.ids_N)) >= SHARED_PREFIX
        and (one.ids_N[:SHARED_PREFIX] == other.ids_N[:SHARED_PREFIX]).all()
    )  # fmt: skip


def _tokens(data: Sequence[Columns]) -> int:
    return sum(len(datum.ids_N) for datum in data)


@dataclass(frozen=True)
class _Group:
    """Data of one unit."""

    data: Sequence[Columns]
    loss: DataLoss

    @property
    def unit(self) -> Unit:
        return Unit(self._plan(), _tokens(self.data), self._sum)

    def _plan(self) -> Layout:
        """Return the layout of the tokens, each of which predicts its targets, which need not be the tokens after it.

        An end is added to each sequence, so that its last token is a predictor too.
        """
        ends = [np.append(datum.ids_N, 0) for datum in self.data]
        plan = layout(ends, [np.arange(len(ids)) > 0 for ids in ends])
        predictors_N = plan.predictors_P[plan.selected_M].numpy()
        widths_N = np.concatenate([np.full(len(datum.ids_N), datum.width) for datum in self.data])
        targets_M = np.concatenate([datum.targets_M for datum in self.data]).astype(np.int64)
        base = int(targets_M.max()) + 1
        distinct_U, selected_M = np.unique(predictors_N.repeat(widths_N) * base + targets_M, return_inverse=True)
        predictors_U, targets_U = np.divmod(distinct_U, base)
        predictors_P, rows_U = np.unique(predictors_U, return_inverse=True)
        return replace(
            plan,
            predictors_P=torch.from_numpy(predictors_P),
            rows_U=None if len(predictors_P) == len(targets_U) else torch.from_numpy(rows_U.reshape(-1)),
            targets_U=torch.from_numpy(targets_U),
            selected_M=torch.from_numpy(selected_M.reshape(-1)),
        )

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        names = ("factor_M", "behaviour_M", "advantages_M")
        return {name: torch.from_numpy(np.concatenate([getattr(datum, name) for datum in self.data])) for name in names}

    def _sum(self, scores: Scores) -> Tensor:
        logprobs_M = scores.logprobs_M
        columns = {name: column.to(logprobs_M.device) for name, column in self._columns.items()}
        loss_M = self.loss.of_places(logprobs_M, columns["behaviour_M"], columns["advantages_M"])
        return (loss_M * columns["factor_M"]).sum()


def split(found: Sequence[F32], data: Sequence[Columns]) -> list[F32]:
    """Return the log-probabilities [M] of each datum, from those of the units."""
    ends = np.cumsum([len(datum.targets_M) for datum in data])
    return np.split(np.concatenate(found), ends[:-1])


def metrics_of(data: Sequence[Columns], loss: DataLoss, logprobs: Sequence[F32], total: float) -> dict[str, float]:
    """Return what is shown of a forward pass, by NAME:REDUCTION. Tokens are targets with a factor other than 0."""
    factor_M = np.concatenate([datum.factor_M for datum in data]).astype(np.float64)
    learned_M = factor_M != 0
    found = {"loss:sum": total, "tokens:sum": float(learned_M.sum())}
    if not loss.is_policy_loss or not learned_M.any():
        return found
    behaviour_M = np.concatenate([datum.behaviour_M for datum in data]).astype(np.float64)
    log_ratio_M = (np.concatenate(logprobs).astype(np.float64) - behaviour_M)[learned_M]
    ratio_M = np.exp(log_ratio_M.clip(max=MAX_LOG_RATIO))
    found |= {"ratio:mean": float(ratio_M.mean()), "ratio:max": float(ratio_M.max())}
    found["kl_sampler:mean"] = float(-log_ratio_M.mean())
    if "clip_low_threshold" in loss.options:
        low, high = loss.options["clip_low_threshold"], loss.options["clip_high_threshold"]
        found["clipped:mean"] = float(((ratio_M < low) | (ratio_M > high)).mean())
    return found
