"""The loss as it is put together from a spec's parts, against a float64 loop over tokens, and by gradient check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.services.trainer.algorithm.objective import objective
from opentinker.services.trainer.batch.micro_batch import MicroBatch, give_credit, micro_batches
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from tests.support.learning import random_groups, torch_spec

VERSION = WeightVersion(1, 3)
"""Everything was sampled three versions before."""


def made(**algorithm: Any) -> tuple[JobSpec, list[MicroBatch], list[list[float]]]:
    """A batch in several micro-batches, in float64, and the log-probabilities of the three policies beside it."""
    spec = torch_spec("m", algorithm=algorithm, train={"tokens_per_micro_batch": 60})
    groups = random_groups(4, reference=True)
    (micros,) = micro_batches(groups, VERSION, spec, torch.device("cpu"))
    give_credit(micros, assign(groups, spec.algorithm))
    dice = np.random.default_rng(1)
    assert len(micros) > 1
    now: list[list[float]] = []
    for micro in micros:
        count = len(micro.behaviour_M)
        micro.behaviour_M = micro.behaviour_M.double()
        micro.start_M = start_M = micro.behaviour_M + torch.tensor(dice.normal(0, 0.4, count))
        now.append((start_M + torch.tensor(dice.normal(0, 0.3, count))).tolist())
    return spec, micros, now


def expected(spec: JobSpec, micros: list[MicroBatch], now: list[list[float]], entropy: float) -> float:
    """Recomputed proximal policy, PPO clip, IcePop weights, k2 to the reference, entropy, mean of sequence means."""
    algorithm = spec.algorithm
    sequences: list[list[float]] = []
    for micro, logprobs in zip(micros, now, strict=True):
        assert micro.start_M is not None and micro.reference_M is not None
        own: list[list[float]] = [[] for _ in micro.members]
        columns = (logprobs, micro.start_M, micro.behaviour_M, micro.reference_M, micro.advantages_M, micro.sequence_M)
        for p, q, m, r, a, s in zip(*(map(float, column) for column in columns), strict=True):
            u, k = math.exp(p - q), math.exp(q - m)
            policy = -min(u * a, sorted((0.8, u, 1.2))[1] * a) * (k if 0.7 <= k <= 1.5 else 0.0)
            own[int(s)].append(policy + algorithm.kl_coef * (p - r) ** 2 / 2 - algorithm.entropy_coef * entropy)
        sequences += own
    return sum(sum(tokens) / len(tokens) for tokens in sequences) / len(sequences)


PARTS = {
    "loss": "ppo",
    "proximal": "recomputed",
    "correction": "icepop",
    "icepop_low": 0.7,
    "icepop_high": 1.5,
    "kl_coef": 0.3,
    "kl_estimator": "k2",
    "entropy_coef": 0.2,
    "aggregation": "sequence_mean",
}


def test_all_parts_together_are_their_formula_however_the_batch_was_cut() -> None:
    spec, micros, now = made(**PARTS)
    found = 0.0
    for micro, logprobs in zip(micros, now, strict=True):
        logprobs_M = torch.tensor(logprobs, dtype=torch.float64)
        result = objective(logprobs_M, torch.full_like(logprobs_M, 1.5), micro, spec.algorithm)
        found += float(result.loss)
        assert micro.start_M is not None
        k = (micro.start_M - micro.behaviour_M).exp()
        dropped = (k < 0.7) | (k > 1.5)
        assert dropped.any() and result.masked_M[dropped].all()
    assert found == pytest.approx(expected(spec, micros, now, 1.5), abs=1e-6)


@pytest.mark.parametrize(
    "parts", [PARTS, {"name": "gspo", "kl_coef": 0.1}, {"name": "grpo", "proximal": "recomputed"}, {"loss": "dppo"}]
)
def test_its_gradient_is_that_of_finite_differences(parts: dict[str, Any]) -> None:
    spec, micros, now = made(**parts)
    micro, logprobs_M = micros[0], torch.tensor(now[0], dtype=torch.float64, requires_grad=True)
    entropy_M = torch.full_like(logprobs_M, 1.5, requires_grad=bool(spec.algorithm.entropy_coef))
    inputs = (logprobs_M, entropy_M)
    assert torch.autograd.gradcheck(lambda p, h: objective(p, h, micro, spec.algorithm).loss, inputs)
