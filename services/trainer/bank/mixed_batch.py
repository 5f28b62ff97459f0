"""One forward and backward pass over rows of several adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opentinker.services.trainer.bank.adapter import Adapter, FullShape, Segment
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.full_weights import computing_with
from opentinker.services.trainer.bank.pass_part import PassPart, Scores
from opentinker.services.trainer.bank.sole_adapter import SoleAdapter, deterministic_algorithms
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.nn.layout import Layout, join
from opentinker.shared.nn.models import autocast
from opentinker.shared.types.core import F32


@dataclass
class Piece:
    """Rows of one command in a pass."""

    adapter: Adapter
    part: PassPart
    gradient: Tensor | None = None
    """Flat vector that the backward pass adds to; None: there is no backward pass."""


class PieceResult(NamedTuple):
    loss: float
    logprobs: list[F32]
    """[M] of each unit."""
    is_finite: bool
    """Whether loss and gradient are finite."""


@dataclass
class MixedBatch:
    """Pieces in one packed stream of tokens. Pieces share no prefix, not even an equal one: their states differ."""

    pieces: Sequence[Piece]
    plan: Layout = field(init=False)
    ends: list[int] = field(init=False)
    """Where each piece ends in the stream."""
    is_sole: bool = field(init=False)
    """Whether the pass is of a deterministic adapter, or of all weights."""

    def __post_init__(self) -> None:
        plans = [piece.part.plan for piece in self.pieces]
        self.plan = plans[0] if len(plans) == 1 else join(plans)
        self.is_sole = any(
            piece.adapter.deterministic or isinstance(piece.adapter.shape, FullShape) for piece in self.pieces
        )
        if self.is_sole and len(self.pieces) > 1:
            raise ValueError("a deterministic adapter has its passes to itself, and so have all weights")
        self.ends = list(accumulate(len(plan.ids_N) for plan in plans))

    def run(self, base: BaseModel) -> list[PieceResult]:
        """Compute losses and log-probabilities, and add to the gradients of the pieces that have one."""
        plan = self.plan.to(torch.device(base.device))
        backward = any(piece.gradient is not None for piece in self.pieces)
        options = [piece.part.options for piece in self.pieces]
        with self._adapters(base), torch.set_grad_enabled(backward):
            with autocast(base.device, base.dtype):
                scores = token_scores(
                    base.causal,
                    plan,
                    temperature=self._temperature(plan),
                    entropy_gradient=any(option.entropy_gradient for option in options),
                    hits=any(option.hits for option in options),
                )
            parts = Scores(*scores).split([sum(piece.part.counts) for piece in self.pieces])
            losses = [piece.part.loss(own) for piece, own in zip(self.pieces, parts, strict=True)]
            if backward:
                torch.autograd.backward([
                    loss for loss, piece in zip(losses, self.pieces, strict=True) if piece.gradient is not None
                ])  # fmt: skip
        logprobs = [part.logprobs_M.detach() for part in parts]
        return self._results(logprobs, torch.stack([loss.detach() for loss in losses]))

    @contextmanager
    def _adapters(self, base: BaseModel) -> Iterator[None]:
        if not self.is_sole:
            with base.segments.used(self._segments()):
                yield
            return
        (piece,) = self.pieces
        if isinstance(piece.adapter.shape, FullShape):
            with computing_with(base.causal, piece.adapter.shape, piece.adapter.weights, piece.gradient):
                yield
            return
        sole = SoleAdapter.of(piece.adapter, piece.gradient, adapted=piece.part.options.adapted)
        with deterministic_algorithms(), base.segments.used((), sole):
            yield

    def _segments(self) -> list[Segment]:
        found = []
        for start, end, piece in zip([0, *self.ends], self.ends, self.pieces, strict=False):
            shape = piece.adapter.lora
            gradients = {} if piece.gradient is None else shape.pairs(piece.gradient)
            weights = shape.pairs(piece.adapter.weights) if piece.part.options.adapted else {}
            found.append(Segment(start, end, shape.scaling, weights, gradients))
        return found

    def _temperature(self, plan: Layout) -> Tensor | float:
        assert plan.temperatures_P is not None
        values = {piece.part.options.temperature for piece in self.pieces}
        return values.pop() if self.is_sole or values == {1.0} else plan.temperatures_P

    def _results(self, logprobs: Sequence[Tensor], losses_P: Tensor) -> list[PieceResult]:
        largest_P = torch.stack([
            losses_P[p] * 0 if piece.gradient is None else piece.gradient.abs().amax()
            for p, piece in enumerate(self.pieces)
        ])  # fmt: skip
        finite_P = (losses_P.isfinite() & largest_P.isfinite()).tolist()
        results = []
        for piece, values, loss, finite in zip(self.pieces, logprobs, losses_P.tolist(), finite_P, strict=True):
            ends = np.cumsum(piece.part.counts)
            results.append(PieceResult(loss, np.split(values.float().cpu().numpy(), ends[:-1]), finite))
        return results
