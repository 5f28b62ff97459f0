"""Preference losses beside float64 formulas written from the papers, and beside TRL's own code."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from opentinker.services.trainer.algorithm import preference

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):  # it would load vLLM to look at its version
    from trl.trainer.dpo_trainer import DPOTrainer

PAIRS, LONGEST = 5, 7


def test_dpo_is_equation_7_and_smoothing_a_mixture_of_both_ways_round() -> None:
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(0, 9, PAIRS), rng.normal(0, 9, PAIRS)
    for beta, smoothing in ((0.1, 0.0), (0.7, 0.0), (0.7, 0.2)):
        expected = [
            -(1 - smoothing) * math.log(1 / (1 + math.exp(-beta * (c - r))))
            - smoothing * math.log(1 / (1 + math.exp(-beta * (r - c))))
            for c, r in zip(chosen, rejected, strict=True)
        ]
        found = preference.sigmoid(torch.tensor(chosen), torch.tensor(rejected), beta=beta, label_smoothing=smoothing)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_dpo_gradient_is_the_papers() -> None:
    """-beta sigmoid(-beta h) for the chosen, the opposite for the rejected (section 4 of the paper)."""
    chosen = torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([2.0, -5.0, 0.0], dtype=torch.float64, requires_grad=True)
    preference.sigmoid(chosen, rejected, beta=0.3).sum().backward()
    expected = -0.3 * torch.sigmoid(-0.3 * (chosen - rejected)).detach()
    assert chosen.grad is not None and rejected.grad is not None
    torch.testing.assert_close(chosen.grad, expected)
    torch.testing.assert_close(rejected.grad, -expected)


def test_large_margins_stay_finite() -> None:
    far = preference.sigmoid(torch.tensor([-1e4, 1e4]), torch.tensor([0.0, 0.0]), beta=1.0)
    assert far.tolist() == [1e4, 0.0]


def test_ipo_is_equation_17_on_means_per_token() -> None:
    found = preference.ipo(
        *(torch.tensor(values, dtype=torch.float64) for values in ([6.0, 1.0], [-2.0, 4.0], [3.0, 1.0], [4.0, 2.0])),
        beta=0.25,
    )
    assert found.tolist() == [(6 / 3 + 2 / 4 - 2) ** 2, (1 - 4 / 2 - 2) ** 2]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_loss_rewards_and_gradient_are_those_of_trl(loss: str) -> None:
    rng = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, LONGEST, (2 * PAIRS,), generator=rng)
    completion = (torch.arange(LONGEST) > 0) & (torch.arange(LONGEST) <= lengths[:, None])
    logprobs = torch.randn(2 * PAIRS, LONGEST - 1, dtype=torch.float64, generator=rng) * completion[:, 1:]
    reference = torch.randn(2 * PAIRS, dtype=torch.float64, generator=rng) * 3

    theirs = logprobs.clone().requires_grad_()
    outputs = SimpleNamespace(
        log_probs=theirs, entropy=theirs * 0, is_top1=theirs > 0, mean_logits=theirs.detach() * 0, aux_loss=None
    )
    same = lambda values: values  # noqa: E731
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=0.2,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": torch.ones_like(completion, dtype=torch.long),
        "attention_mask": torch.ones_like(completion, dtype=torch.long),
        "completion_mask": completion.long(),
        "ref_chosen_logps": reference[:PAIRS],
        "ref_rejected_logps": reference[PAIRS:],
    }
    expected = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    expected.backward()

    ours = logprobs.clone().requires_grad_()
    chosen, rejected = (ours.sum(1) - reference).chunk(2)
    tokens = completion.sum(1)
    if loss == "ipo":
        found = preference.ipo(chosen, rejected, tokens[:PAIRS], tokens[PAIRS:], beta=0.2).mean()
    else:
        found = preference.sigmoid(chosen, rejected, beta=0.2).mean()
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    chosen, rejected = chosen.detach(), rejected.detach()
    metrics = trainer._metrics["train"]
    assert metrics["rewards/chosen"] == [pytest.approx(0.2 * float(chosen.mean()))]
    assert metrics["rewards/accuracies"] == [pytest.approx(float((chosen > rejected).double().mean()))]
