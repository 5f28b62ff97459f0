"""AdamW on several adapters in one call, each with its own settings.

On the CPU the weights are bit for bit those of torch.optim.AdamW with foreach=True on each adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.sole_adapter import deterministic_algorithms
from opentinker.shared.types.tinker import SMALLEST_EPS

LARGEST_SETTING = 1e6
"""Every number of a step then fits a float32: adapters that step in one call cannot fail each other."""
LOWEST = {"lr": 0.0, "eps": SMALLEST_EPS, "weight_decay": 0.0}


class AdamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one optimizer step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of the gradient; None: it is not clipped."""


def check_settings(settings: AdamSettings) -> None:
    """Raise Refused for settings that AdamW has no meaning for."""
    for name, lowest in LOWEST.items():
        if not lowest <= getattr(settings, name) <= LARGEST_SETTING:
            raise Refused(f"{name} = {getattr(settings, name)}: must be {lowest:g} to {LARGEST_SETTING:g}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(settings, name) < 1:
            raise Refused(f"{name} = {getattr(settings, name)}: must be at least 0 and below 1")
    if settings.clip is not None and not settings.clip > 0:
        raise Refused(f"clip = {settings.clip}: must be above 0; leave it out for no clipping")


def gradient_norms(adapters: Sequence[Adapter]) -> Tensor:
    """Return the norm of each adapter's gradient sum, as torch's clip_grad_norm_ computes it."""
    return torch.stack([
        nn.utils.get_total_norm(one.shape.tensors(one.gradient)) for one in adapters
    ])  # fmt: skip


def step(adapters: Sequence[Adapter], settings: Sequence[AdamSettings], norms: Tensor) -> None:
    """Clip the gradient sums, step, and reset the sums.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
    w = (1 - lr decay) w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
    Source: AdamW, arXiv 1711.05101, algorithm 2.
    """
    steps = [one.steps + 1 for one in adapters]
    correction1 = [1 - chosen.beta1**count for chosen, count in zip(settings, steps, strict=True)]
    correction2 = [(1 - chosen.beta2**count) ** 0.5 for chosen, count in zip(settings, steps, strict=True)]
    sizes = [-(chosen.lr / correction) for chosen, correction in zip(settings, correction1, strict=True)]
    root = [torch.empty_like(one.exp_avg_sq) for one in adapters]
    # Nothing fails from here on: after a step that has failed all adapters are as before it.
    w, g = [one.weights for one in adapters], [one.gradient for one in adapters]
    m, v = [one.exp_avg for one in adapters], [one.exp_avg_sq for one in adapters]
    for gradient, norm, chosen in zip(g, norms, settings, strict=True):
        if chosen.clip is not None:
            gradient.mul_((chosen.clip / (norm + 1e-6)).clamp(max=1.0))
    torch._foreach_mul_(w, [1 - chosen.lr * chosen.weight_decay for chosen in settings])
    torch._foreach_lerp_(m, g, [1 - chosen.beta1 for chosen in settings])
    torch._foreach_mul_(v, [chosen.beta2 for chosen in settings])
    torch._foreach_addcmul_(v, g, g, [1 - chosen.beta2 for chosen in settings])
    torch._foreach_copy_(root, v)
    torch._foreach_sqrt_(root)
    torch._foreach_div_(root, correction2)
    torch._foreach_add_(root, [chosen.eps for chosen in settings])
    torch._foreach_addcdiv_(w, m, root, sizes)
    torch._foreach_zero_(g)
    for one, count in zip(adapters, steps, strict=True):
        one.steps = count


def step_alone(adapter: Adapter, settings: AdamSettings, norm: Tensor) -> None:
    """The same for a deterministic adapter, by torch.optim.AdamW as a trainer of one job uses it: the same bits."""
    if settings.clip is not None:
        adapter.gradient.mul_((settings.clip / (norm + 1e-6)).clamp(max=1.0))
    vectors = (adapter.weights, adapter.gradient, adapter.exp_avg, adapter.exp_avg_sq)
    matrices = list(zip(*(adapter.shape.tensors(vector) for vector in vectors), strict=True))
    parameters, device = [], adapter.weights.device
    for weights, gradient, _, _ in matrices:
        parameters.append(weights.detach().requires_grad_(True))
        parameters[-1].grad = gradient
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
        weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip
    for parameter, (_, _, exp_avg, exp_avg_sq) in zip(parameters, matrices, strict=True):
        steps = torch.tensor(float(adapter.steps), device=device)
        optimizer.state[parameter] = {"step": steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    with deterministic_algorithms():
        optimizer.step()
    adapter.steps += 1
    adapter.gradient.zero_()
