"""AdamW over several adapters together equals torch.optim.AdamW with foreach=True on each alone."""

from __future__ import annotations

import torch
from torch import nn

from opentinker.services.trainer.bank import adamw
from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape

SETTINGS = [
    AdamSettings(lr=1e-2),
    AdamSettings(lr=3e-4, beta1=0.8, beta2=0.999, weight_decay=0.1, clip=0.5),
    AdamSettings(lr=1.0, eps=1e-3, weight_decay=0.01, clip=1e6),
]


def adapter(rank: int) -> Adapter:
    shape = AdapterShape(rank, 1.0, {"x": (5, 7), "y": (3, 2)})
    return Adapter.fresh("a", shape, {}, torch.randn(shape.size, generator=torch.Generator().manual_seed(rank)))


def test_steps_are_bit_equal_to_torchs() -> None:
    adapters = [adapter(rank) for rank in (2, 3, 5)]
    twins = [
        [nn.Parameter(matrix.clone()) for pair in a.lora.pairs(a.weights).values() for matrix in pair] for a in adapters
    ]
    optimizers = [
        torch.optim.AdamW(twin, lr=s.lr, betas=(s.beta1, s.beta2), eps=s.eps, weight_decay=s.weight_decay, foreach=True)
        for twin, s in zip(twins, SETTINGS, strict=True)
    ]
    random = torch.Generator().manual_seed(0)
    for step in range(5):
        stepped = [n for n in range(3) if (step + n) % 3 != 2]  # not all of them step together
        for n in stepped:
            adapters[n].gradient += torch.randn(adapters[n].shape.size, generator=random)
            gradients = [m for pair in adapters[n].lora.pairs(adapters[n].gradient).values() for m in pair]
            for parameter, gradient in zip(twins[n], gradients, strict=True):
                parameter.grad = gradient.clone()
            if SETTINGS[n].clip is not None:
                nn.utils.clip_grad_norm_(twins[n], SETTINGS[n].clip or 0.0)
            optimizers[n].step()
        chosen = [adapters[n] for n in stepped]
        adamw.step(chosen, [SETTINGS[n] for n in stepped], adamw.gradient_norms(chosen))
    for one, twin in zip(adapters, twins, strict=True):
        assert torch.equal(one.weights, torch.cat([parameter.detach().flatten() for parameter in twin]))
        assert not one.gradient.any() and 3 <= one.steps <= 4
