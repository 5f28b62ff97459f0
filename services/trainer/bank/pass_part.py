"""A command's part of a pass: units, each a layout of tokens with the loss of their scores.

A job's learner packs its micro-batches, and `tinker/losses.py` the data of the Tinker API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from opentinker.shared.nn.layout import Layout, join


class Scores(NamedTuple):
    """Scores of the learned tokens, [M]; see `forward.token_scores`."""

    logprobs_M: Tensor
    entropy_M: Tensor
    hits_M: Tensor
    """Empty unless asked for."""

    def split(self, counts: Sequence[int]) -> list[Scores]:
        hits = self.hits_M.split(list(counts)) if len(self.hits_M) else [self.hits_M] * len(counts)
        columns = self.logprobs_M.split(list(counts)), self.entropy_M.split(list(counts)), hits
        return [Scores(*parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class PassOptions:
    """How the scores of a command are computed."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    hits: bool = False
    adapted: bool = True
    """False: by the base without the adapter."""


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together in a pass."""

    plan: Layout
    """On the CPU, without temperatures."""
    tokens: int
    """By which its share of the passes is counted."""
    loss: Callable[[Scores], Tensor] | None = None
    """Called in the bank's thread, units in order, and again after a failed pass. None: there is nothing to learn."""


@dataclass(frozen=True)
class PassPart:
    """Units of a command in a pass, whose losses its tenant computes from their scores."""

    units: Sequence[Unit]
    options: PassOptions

    @cached_property
    def plan(self) -> Layout:
        """Layout on the CPU, with temperatures."""
        heat = self.options.temperature
        plans = [replace(u.plan, temperatures_P=torch.full((len(u.plan.predictors_P),), heat)) for u in self.units]
        return plans[0] if len(plans) == 1 else join(plans)

    @cached_property
    def counts(self) -> list[int]:
        """Learned tokens of each unit."""
        return [len(unit.plan.selected_M) for unit in self.units]

    def loss(self, scores: Scores) -> Tensor:
        parts = zip(self.units, scores.split(self.counts), strict=True)
        found = [unit.loss(own) for unit, own in parts if unit.loss is not None]
        return torch.stack(found).sum() if found else scores.logprobs_M.sum() * 0.0
