"""AdamW over several adapters together equals torch.optim.AdamW with foreach=True on each alone."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from opentinker.services.trainer.bank import adamw
from opentinker.services.trainer.bank.adamw import LARGEST_SETTING, LOWEST, AdamSettings, check_settings
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape
from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.types.tinker import SMALLEST_EPS

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


NUMBERS = st.one_of(st.sampled_from([0.0, 1e-12, 1.0, LARGEST_SETTING]), st.floats(0.0, LARGEST_SETTING))
BETAS = st.one_of(st.sampled_from([0.0, 0.9, 1 - 2**-53]), st.floats(0.0, 1.0, exclude_max=True))
CHOSEN = st.builds(
    AdamSettings,
    lr=NUMBERS, beta1=BETAS, beta2=BETAS, eps=NUMBERS.map(lambda eps: max(eps, SMALLEST_EPS)), weight_decay=NUMBERS,
    clip=st.none() | st.floats(1e-300, 1e300),
)  # fmt: skip
ROUNDS = st.lists(st.dictionaries(st.integers(0, 3), CHOSEN, min_size=1), min_size=1, max_size=6)
LARGEST = AdamSettings(
    lr=LARGEST_SETTING,
    beta1=1 - 2**-53,
    beta2=1 - 2**-53,
    eps=LARGEST_SETTING,
    weight_decay=LARGEST_SETTING,
    clip=1e300,
)


@settings(max_examples=60, deadline=None)
@example([{0: AdamSettings(lr=1e-3), 1: LARGEST}, {0: AdamSettings(lr=1e-3)}])
@given(ROUNDS)
def test_any_settings_of_others_leave_an_adapter_as_it_is_alone(rounds: list[dict[int, AdamSettings]]) -> None:
    """Bit for bit, whoever steps beside it and with which settings that are allowed."""
    together, alone = [[adapter(rank) for rank in range(1, 5)] for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    for chosen in rounds:
        for number, own in chosen.items():
            check_settings(own)
            gradient = torch.randn(alone[number].shape.size, generator=random)
            for one in (together[number], alone[number]):
                one.gradient += gradient
            adamw.step([alone[number]], [own], adamw.gradient_norms([alone[number]]))
        stepped = [together[number] for number in chosen]
        adamw.step(stepped, list(chosen.values()), adamw.gradient_norms(stepped))
    for one, other in zip(together, alone, strict=True):
        assert one.steps == other.steps
        for name, vector in one.vectors.items():
            assert torch.equal(vector.nan_to_num(7.0), other.vectors[name].nan_to_num(7.0)), name


def test_a_step_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [adapter(rank) for rank in (2, 3)]
    for one in adapters:
        one.gradient += 1.0
    before = [{name: vector.clone() for name, vector in one.vectors.items()} for one in adapters]

    def fail(*_: object) -> None:
        raise MemoryError("not enough")

    norms = adamw.gradient_norms(adapters)
    with monkeypatch.context() as context, pytest.raises(MemoryError):
        context.setattr(torch, "empty_like", fail)
        adamw.step(adapters, SETTINGS[:2], norms)
    for one, vectors in zip(adapters, before, strict=True):
        assert one.steps == 0 and all(torch.equal(one.vectors[name], vector) for name, vector in vectors.items())


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, 1e300, float("inf"), float("nan")])
def test_settings_that_float32_does_not_hold_are_refused(name: str, value: float) -> None:
    chosen = msgspec.structs.replace(AdamSettings(lr=1e-3), **{name: value})
    with pytest.raises(Refused, match=f"{name} = .*: must be {LOWEST[name]:g} to 1e\\+06"):
        check_settings(chosen)


def test_weights_without_a_gradient_stay_with_the_smallest_eps_and_a_smaller_one_is_refused() -> None:
    """As those of A are at the first step, where B is 0: with eps = 0 they became NaN, and the step had succeeded."""
    smallest, one = AdamSettings(lr=1e-2, eps=SMALLEST_EPS), adapter(2)
    before = one.weights.clone()
    one.gradient[0] = 1.0
    check_settings(smallest)
    adamw.step([one], [smallest], adamw.gradient_norms([one]))
    assert one.weights[0].item() == pytest.approx(before[0].item() - 1e-2, abs=1e-6)
    assert torch.equal(one.weights[1:], before[1:])
    for eps in (0.0, 1e-46):
        with pytest.raises(Refused, match=r"eps = .*: must be 1e-30 to 1e\+06"):
            check_settings(msgspec.structs.replace(smallest, eps=eps))
