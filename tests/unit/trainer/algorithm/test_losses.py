"""Losses and corrections against float64 references written from the papers, and by gradient check."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opentinker.services.trainer.algorithm import corrections, losses
from opentinker.services.trainer.algorithm.advantages import kl_estimate
from opentinker.services.trainer.algorithm.corrections import loglinear_proximal
from opentinker.services.trainer.algorithm.losses import decoupled_ppo, k3
from opentinker.services.trainer.batch.token_metrics import effective_sample_size
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


ONE = torch.tensor([3, 1, 7, 20, 33])
"""Tokens per sequence of the 64."""
SEQUENCE = torch.arange(5).repeat_interleave(ONE)


def per_token(now: list[float], old: list[float], mu: list[float], advantages: list[float]) -> dict[str, list[float]]:
    """Every loss from its paper, one token after the other in plain Python."""
    found: dict[str, list[float]] = {}

    def put(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    start = 0
    sequence_ratio = []
    for n in ONE.tolist():
        gaps = [now[i] - old[i] for i in range(start, start + n)]
        sequence_ratio += [math.exp(sum(gaps) / n)] * n
        start += n
    for p, q, m, a, s in zip(now, old, mu, advantages, sequence_ratio, strict=True):
        u, r = math.exp(p - q), math.exp(p - m)
        clipped = min(u * a, sorted((0.8, u, 1.28))[1] * a)
        put("ppo", -clipped)
        put("dual", -(max(clipped, 1.5 * a) if a < 0 else clipped))
        put("importance_sampling", -r * a)
        put("cispo", -sorted((0.5, u, 1.5))[1] * a * p)
        put("gspo", -min(s * a, sorted((0.95, s, 1.05))[1] * a))
        moved = math.exp(p) - math.exp(m)
        put("dppo", (0.0 if moved * (1 if a > 0 else -1) > 0.02 else -r * a) + 0.1 * (p - m) ** 2)
        tau = 1.0 if a > 0 else 1.05
        put("sapo", -a * (4 / tau) / (1 + math.exp(-tau * (u - 1))))
    return found


def ours(name: str, now: torch.Tensor, old: torch.Tensor, mu: torch.Tensor, a: torch.Tensor) -> losses.PolicyLoss:
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    made = {
        "ppo": lambda: losses.ppo(now, old, a, **clip),
        "dual": lambda: losses.ppo(now, old, a, **clip, dual_clip=1.5),
        "importance_sampling": lambda: losses.importance_sampling(now, mu, a),
        "cispo": lambda: losses.cispo(now, old, a, clip_low=0.5, clip_high=0.5),
        "gspo": lambda: losses.gspo(now, old, a, SEQUENCE, clip_low=0.05, clip_high=0.05),
        "dppo": lambda: losses.dppo(now, mu, a, tv_limit=0.02, log_ratio_penalty=0.1),
        "sapo": lambda: losses.sapo(now, old, a, tau_positive=1.0, tau_negative=1.05),
    }
    return made[name]()


NAMES = ["ppo", "dual", "importance_sampling", "cispo", "gspo", "dppo", "sapo"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_losses_are_the_formulas_of_their_papers(name: str, seed: int) -> None:
    now, old, mu, advantages = tokens(seed)
    expected = per_token(now.tolist(), old.tolist(), mu.tolist(), advantages.tolist())[name]
    np.testing.assert_allclose(ours(name, now, old, mu, advantages).loss_M.numpy(), expected, rtol=1e-11)


@pytest.mark.parametrize("name", [*NAMES, "decoupled_ppo"])
def test_gradients_are_those_of_finite_differences_and_reach_only_the_current_policy(name: str) -> None:
    now, old, mu, advantages = tokens(7)
    frozen = now.clone()
    old.requires_grad_()
    now.requires_grad_()

    def found(logprobs: torch.Tensor) -> losses.PolicyLoss:
        if name == "decoupled_ppo":
            return decoupled_ppo(logprobs, old, mu, advantages, **CLIP)
        if name == "cispo":  # finite differences would see the weight move, which has no gradient
            weight = (frozen - old.detach()).exp().clamp(0.5, 1.5)
            return losses.PolicyLoss(-weight * advantages * logprobs, weight > 0)
        return ours(name, logprobs, old, mu, advantages)

    assert torch.autograd.gradcheck(lambda x: found(x).loss_M.sum(), now)
    result = ours(name, now, old, mu, advantages) if name == "cispo" else found(now)
    result.loss_M.sum().backward()
    assert old.grad is None
    assert now.grad is not None
    torch.testing.assert_close(now.grad, torch.autograd.grad(found(now).loss_M.sum(), now)[0])
    if name in ("ppo", "dual", "decoupled_ppo"):
        assert (now.grad[result.clipped_M] == 0).all() and (now.grad[~result.clipped_M] != 0).all()
    if name in ("cispo", "sapo", "importance_sampling"):
        assert (now.grad != 0).all(), "every token keeps a gradient"


@pytest.mark.parametrize("name", [*NAMES, "decoupled_ppo"])
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """With pi = pi_prox = mu the gradient per token is -A (gspo: of its sequence's mean)."""
    now, _, _, advantages = tokens(3)
    if name == "gspo":
        advantages = losses.sequence_means(advantages, SEQUENCE)[SEQUENCE]
    now.requires_grad_()
    still = now.detach()
    found = (
        decoupled_ppo(now, still, still, advantages, **CLIP)
        if name == "decoupled_ppo"
        else ours(name, now, still, still, advantages)
    )
    found.loss_M.sum().backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad, -advantages)
    if name != "cispo":
        assert not found.clipped_M.any()


@pytest.mark.parametrize("name", [*NAMES, "decoupled_ppo"])
@pytest.mark.parametrize("gap", [100.0, 89.0, -100.0])
def test_extreme_ratios_have_finite_losses_and_gradients_and_clipped_ones_have_none(name: str, gap: float) -> None:
    """In float32, where exp(89) is infinite, for advantages of both signs and none."""
    advantages = torch.tensor([1.5, -1.5, 0.0])
    old = torch.full((3,), -gap if gap > 0 else 0.0)
    now = (old + gap).requires_grad_()
    whole = torch.arange(3)
    made = {
        "decoupled_ppo": lambda: decoupled_ppo(now, old, old, advantages, **CLIP),
        "gspo": lambda: losses.gspo(now, old, advantages, whole, clip_low=0.05, clip_high=0.05),
    }
    found = made[name]() if name in made else ours(name, now, old, old, advantages)
    found.loss_M.sum().backward()
    assert now.grad is not None
    assert found.loss_M.isfinite().all() and now.grad.isfinite().all(), (found.loss_M, now.grad)
    penalty = 2 * 0.1 * gap if name == "dppo" else 0.0
    assert now.grad[2].item() == pytest.approx(penalty), "an advantage of 0 has nothing to say"
    if name not in ("cispo", "dppo"):  # cispo keeps every token's gradient, dppo's penalty too
        assert (now.grad[found.clipped_M] == 0).all()
        assert now.grad.abs().max() < 1e-8
        assert found.clipped_M[0] == (gap > 0), "where the clip, or the bound, acts"


@pytest.mark.parametrize("correction", ["tis", "icepop", "geometric"])
def test_corrections_of_extreme_ratios_leave_the_loss_finite(correction: str) -> None:
    mu, advantages = torch.tensor([-100.0, -200.0, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    now = torch.tensor([0.0, 0.0, -100.0], requires_grad=True)
    weight = {
        "tis": lambda: corrections.tis(now, mu, tis_cap=2.0),
        "icepop": lambda: corrections.icepop(now, mu, icepop_low=0.5, icepop_high=2.0),
        "geometric": lambda: corrections.geometric(now, mu, torch.arange(3), geometric_low=0.9, geometric_high=1.1),
    }[correction]()
    (losses.importance_sampling(now, mu, advantages).loss_M * weight).sum().backward()
    assert now.grad is not None and now.grad.isfinite().all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_of_extreme_gaps_is_finite(name: str) -> None:
    now = torch.tensor([-100.0, 0.0], requires_grad=True)
    found = losses.KL[name](now, torch.tensor([0.0, -100.0]))
    found.sum().backward()
    assert found.isfinite().all() and now.grad is not None and now.grad.isfinite().all()


def test_decoupled_ppo_is_ppo_with_truncated_importance_sampling() -> None:
    now, old, mu, advantages = tokens(5)
    both = decoupled_ppo(now, old, mu, advantages, **CLIP)
    apart = losses.ppo(now, old, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(both.loss_M, apart.loss_M * corrections.tis(old, mu, tis_cap=2.0))


def test_dual_clip_acts_on_negative_advantages_alone() -> None:
    """Three tokens by hand: u = 3, A = -1 is bounded at 2; with A = 1 the clip acts; u = 1.5, A = -1 is free."""
    ratio, advantages = torch.tensor([3.0, 3.0, 1.5]), torch.tensor([-1.0, 1.0, -1.0])
    found = losses.ppo(ratio.log(), torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    torch.testing.assert_close(found.loss_M, torch.tensor([2.0, -1.2, 1.5]))
    assert found.clipped_M.tolist() == [True, True, False]


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


def test_kl_estimates_are_those_of_the_note_and_the_loss_and_the_reward_have_the_same() -> None:
    now, reference, _, _ = tokens(4)
    for i, (p, q) in enumerate(zip(now.tolist(), reference.tolist(), strict=True)):
        d = p - q
        assert losses.k1(now, reference)[i].item() == pytest.approx(d)
        assert losses.k2(now, reference)[i].item() == pytest.approx(d * d / 2)
        assert k3(now, reference)[i].item() == pytest.approx(math.exp(-d) - 1 + d)
    for name, estimate in losses.KL.items():
        np.testing.assert_allclose(estimate(now, reference), kl_estimate(now.numpy(), reference.numpy(), name))


def test_gradient_of_k2_is_that_of_the_kl_and_that_of_k1_vanishes() -> None:
    """Expectations under pi over a whole vocabulary, the sampling distribution held fixed."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(30, dtype=torch.float64, generator=rng).requires_grad_()
    reference = torch.randn(30, dtype=torch.float64, generator=rng).log_softmax(0)
    pi = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((pi.exp() * (pi - reference)).sum(), logits, retain_graph=True)
    (by_k2,) = torch.autograd.grad((pi.exp().detach() * losses.k2(pi, reference)).sum(), logits, retain_graph=True)
    (by_k1,) = torch.autograd.grad((pi.exp().detach() * losses.k1(pi, reference)).sum(), logits)
    torch.testing.assert_close(by_k2, exact)
    torch.testing.assert_close(by_k1, torch.zeros_like(exact))


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


def test_aggregations_weigh_tokens_as_their_papers_do_however_the_batch_is_cut() -> None:
    rng = np.random.default_rng(0)
    counts = [3, 1, 7, 20]
    values = [rng.normal(size=n) for n in counts]
    expected = {
        "token": sum(v.sum() for v in values) / sum(counts),
        "sequence": sum(v.mean() for v in values) / 4,
        "constant": sum(v.sum() / 25 for v in values) / 4,
    }
    found = dict.fromkeys(expected, 0.0)
    for part in ([0, 1], [2, 3]):
        lengths = torch.tensor([counts[i] for i in part])
        flat = torch.tensor(np.concatenate([values[i] for i in part]))
        found["token"] += (flat * losses.token_mean(lengths, 31)).sum().item()
        found["sequence"] += (flat * losses.sequence_mean(lengths, 4)).sum().item()
        found["constant"] += (flat * losses.constant(lengths, 4, 25)).sum().item()
    assert found == pytest.approx(expected, rel=1e-6)


def test_corrections_are_their_formulas() -> None:
    now, old, mu, _ = tokens(9)
    tis = corrections.tis(old, mu, tis_cap=2.0)
    pop = corrections.icepop(old, mu, icepop_low=0.5, icepop_high=1.5)
    kept = corrections.geometric(now, mu, SEQUENCE, geometric_low=0.9, geometric_high=1.1)
    start = 0
    for s, n in enumerate(ONE.tolist()):
        mean = math.prod(math.exp(now[i] - mu[i]) ** (1 / n) for i in range(start, start + n))
        for i in range(start, start + n):
            k = math.exp(old[i]) / math.exp(mu[i])
            assert tis[i].item() == pytest.approx(min(k, 2.0))
            assert pop[i].item() == pytest.approx(k if 0.5 <= k <= 1.5 else 0.0)
            assert kept[i].item() == (0.9 <= mean <= 1.1), s
        start += n
    assert 0 < kept.mean() < 1 and 0 < (pop == 0).double().mean() < 1


def test_corrections_and_the_proximal_policy_carry_no_gradient() -> None:
    now, old, mu, _ = (t.requires_grad_() for t in tokens(9))
    found = (
        corrections.tis(old, mu, tis_cap=2.0),
        corrections.icepop(old, mu, icepop_low=0.5, icepop_high=1.5),
        corrections.geometric(now, mu, SEQUENCE, geometric_low=0.9, geometric_high=1.1),
        loglinear_proximal(now, mu.detach(), torch.ones_like(now) * 3),
    )
    assert not any(weight.requires_grad for weight in found)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "value"])
def test_gradients_of_kl_and_value_loss_are_those_of_finite_differences(name: str) -> None:
    now, reference, before, returns = tokens(13)

    def found(values: torch.Tensor) -> torch.Tensor:
        if name == "value":
            return losses.value_loss(values, before, returns, value_clip=0.5)
        return losses.KL[name](values, reference)

    assert torch.autograd.gradcheck(lambda x: found(x).sum(), now.requires_grad_())


@pytest.mark.parametrize("seed", range(3))
def test_value_loss_is_the_formula_of_its_source(seed: int) -> None:
    values, before, returns, _ = tokens(seed)
    found = losses.value_loss(values, before, returns, value_clip=0.5)
    for i, (v, b, r) in enumerate(zip(values.tolist(), before.tolist(), returns.tolist(), strict=True)):
        bounded = min(max(v, b - 0.5), b + 0.5)
        assert found[i].item() == pytest.approx(max((v - r) ** 2, (bounded - r) ** 2) / 2, rel=1e-12)


def test_value_loss_stops_where_the_value_moved_too_far_towards_the_return() -> None:
    values = torch.tensor([0.0, 0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    before, returns = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    loss = losses.value_loss(values, before, returns, value_clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5, 0.32, 0.32, 1.125], dtype=torch.float64))
    loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-1.0, 0.0, 0.0, -1.5], dtype=torch.float64))


def test_effective_sample_size() -> None:
    assert effective_sample_size(np.zeros(10)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([0.0, -800.0])) == pytest.approx(0.5)
    weights = np.array([1.0, 2.0, 5.0])
    assert effective_sample_size(np.log(weights) + 900) == pytest.approx(64 / (3 * 30))


def test_packing_keeps_every_trajectory_whole_and_the_budget() -> None:
    rng = np.random.default_rng(0)
    for budget in (1, 50, 400, 10**6):
        lengths = [int(n) for n in rng.integers(1, 120, 200)]
        batches = pack(lengths, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(200))
        for batch in batches:
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


def test_packing_keeps_neighbours_together() -> None:
    lengths = [10, 90, 20, 80, 30, 70, 40, 60]
    assert pack(lengths, 200) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack(lengths, 190) == [[0, 1, 2], [3, 4, 5], [6, 7]]
