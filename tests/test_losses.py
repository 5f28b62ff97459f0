"""Losses and advantages against float64 references written from the papers, and by gradient check."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opentinker.services.trainer.advantages import grpo
from opentinker.services.trainer.losses import decoupled_ppo, k3, loglinear_proximal, token_mean
from opentinker.services.trainer.micro_batch import effective_sample_size
from opentinker.shared.nn.packing import pack

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "behaviour_cap": 2.0}


def tokens(seed: int, n: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    mu = rng.uniform(-6, -0.1, n)
    proximal = mu + rng.normal(0, 0.6, n)
    now = proximal + rng.normal(0, 0.3, n)
    return tuple(torch.tensor(x, dtype=torch.float64) for x in (now, proximal, mu, rng.normal(0, 1, n)))


@pytest.mark.parametrize("seed", range(5))
def test_decoupled_ppo_is_the_formula_of_the_paper(seed: int) -> None:
    """Token by token, in plain Python: J = (pi_prox / mu) * min(u A, clip(u) A), the weight capped."""
    now, proximal, mu, advantages = tokens(seed)
    result = decoupled_ppo(now, proximal, mu, advantages, **CLIP)
    for i, (p, q, m, a) in enumerate(zip(*(t.tolist() for t in (now, proximal, mu, advantages)), strict=True)):
        u, w = math.exp(p) / math.exp(q), min(math.exp(q) / math.exp(m), 2.0)
        bounded = max(0.8, min(1.28, u))
        assert result.loss_M[i].item() == pytest.approx(-w * min(u * a, bounded * a), rel=1e-12)
        assert bool(result.clipped_M[i]) == ((a > 0 and u > 1.28) or (a < 0 and u < 0.8))
    assert 0 < result.clipped_M.double().mean() < 1


def test_gradients_are_those_of_finite_differences_and_reach_only_the_current_policy() -> None:
    now, proximal, mu, advantages = tokens(7)
    proximal.requires_grad_()
    now.requires_grad_()

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return token_mean(decoupled_ppo(logprobs, proximal, mu, advantages, **CLIP).loss_M, 100)

    assert torch.autograd.gradcheck(loss, now)
    loss(now).backward()
    assert proximal.grad is None
    assert now.grad is not None
    clipped = decoupled_ppo(now, proximal, mu, advantages, **CLIP).clipped_M
    assert (now.grad[clipped] == 0).all() and (now.grad[~clipped] != 0).all()


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    """With pi = pi_prox = mu the gradient per token is -A / tokens."""
    now, _, _, advantages = tokens(3)
    now.requires_grad_()
    token_mean(decoupled_ppo(now, now.detach(), now.detach(), advantages, **CLIP).loss_M, 64).backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad, -advantages / 64)


def test_loglinear_proximal_lies_one_version_behind_on_the_line_from_mu_to_pi() -> None:
    """Token by token: with s versions of lag, pi_prox = mu^(1/s) * pi^((s-1)/s), and u is the s-th root of pi / mu."""
    now, _, mu, advantages = tokens(11)
    lags = [i % 5 for i in range(len(mu))]
    proximal = loglinear_proximal(now.requires_grad_(), mu, torch.tensor(lags, dtype=torch.float64))
    assert not proximal.requires_grad
    result = decoupled_ppo(now, proximal, mu, advantages, **CLIP)
    for i, (p, m, a, s) in enumerate(zip(now.tolist(), mu.tolist(), advantages.tolist(), lags, strict=True)):
        pi, sampled = math.exp(p), math.exp(m)
        expected = sampled if s <= 1 else sampled ** (1 / s) * pi ** ((s - 1) / s)
        assert math.exp(proximal[i].item()) == pytest.approx(expected, rel=1e-12)
        u, w = (pi / sampled) ** (1 / max(1, s)), min(expected / sampled, 2.0)
        assert result.loss_M[i].item() == pytest.approx(-w * min(u * a, max(0.8, min(1.28, u)) * a), rel=1e-12)
    (gradient,) = torch.autograd.grad(result.loss_M.sum(), now)
    assert (gradient[result.clipped_M] == 0).all() and result.clipped_M.any()


def test_k3_is_unbiased_and_not_negative() -> None:
    """Its expectation under pi is KL(pi || reference), computed here over a whole vocabulary."""
    rng = torch.Generator().manual_seed(0)
    pi = torch.randn(50, dtype=torch.float64, generator=rng).log_softmax(0)
    reference = torch.randn(50, dtype=torch.float64, generator=rng).log_softmax(0)
    estimates = k3(pi, reference)
    assert (estimates >= 0).all()
    exact = (pi.exp() * (pi - reference)).sum()
    torch.testing.assert_close((pi.exp() * estimates).sum(), exact)
    assert torch.autograd.gradcheck(lambda x: k3(x, reference), pi.clone().requires_grad_())


def test_token_mean_does_not_depend_on_the_cut() -> None:
    loss = torch.arange(10.0)
    parts = token_mean(loss[:3], 10) + token_mean(loss[3:], 10)
    torch.testing.assert_close(parts, loss.mean())


def test_group_advantages() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    np.testing.assert_allclose(grpo(rewards), [(r - mean) / (std + 1e-4) for r in rewards])
    np.testing.assert_allclose(grpo(rewards, normalize_std=False), [r - mean for r in rewards])
    assert (grpo([0.1] * 6) == 0).all()
    with pytest.raises(ValueError, match="two"):
        grpo([1.0])


def test_effective_sample_size() -> None:
    assert effective_sample_size(np.zeros(10)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([0.0, -800.0])) == pytest.approx(0.5)
    weights = np.array([1.0, 2.0, 5.0])
    assert effective_sample_size(np.log(weights) + 900) == pytest.approx(64 / (3 * 30))


@pytest.mark.parametrize("order", ["arrival", "longest_first"])
def test_packing_keeps_every_trajectory_whole_and_the_budget(order: str) -> None:
    rng = np.random.default_rng(0)
    for budget in (1, 50, 400, 10**6):
        lengths = [int(n) for n in rng.integers(1, 120, 200)]
        batches = pack(lengths, budget, order)  # type: ignore[arg-type]
        assert sorted(i for batch in batches for i in batch) == list(range(200))
        for batch in batches:
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


def test_longest_first_fills_evenly_and_arrival_keeps_neighbours() -> None:
    lengths = [10, 90, 20, 80, 30, 70, 40, 60]
    assert [sum(lengths[i] for i in batch) for batch in pack(lengths, 200, "longest_first")] == [200, 200]
    assert pack(lengths, 200, "arrival") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack(lengths, 190, "arrival") == [[0, 1, 2], [3, 4, 5], [6, 7]]
