"""The adapters' part of a layer, by a loop over segments and by grouped products, against sums in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opentinker.services.trainer.bank import adapted_linear, grouped_products
from opentinker.services.trainer.bank.adapted_linear import AdaptedLinear, Segments
from opentinker.services.trainer.bank.adapter import Pair, Segment
from opentinker.services.trainer.bank.grouped_products import may_group

INPUTS, OUTPUTS = 16, 24
LENGTHS, RANKS, SCALINGS = (5, 9, 3), (4, 8, 11), (2.0, 0.5, 1.7)


def segments_of(dtype: torch.dtype) -> list[Segment]:
    """Three adapters; the second one's rows are not learned from."""
    drawn, found, start = torch.Generator().manual_seed(0), [], 0
    for n, (length, rank, scaling) in enumerate(zip(LENGTHS, RANKS, SCALINGS, strict=True)):
        pair = Pair(*(torch.randn(size, generator=drawn).to(dtype) for size in ((rank, INPUTS), (OUTPUTS, rank))))
        sums = {} if n == 1 else {"layer": Pair(*(torch.ones_like(matrix) for matrix in pair))}
        found.append(Segment(start, start + length, scaling, {"layer": pair}, sums))
        start += length
    return found


def results(dtype: torch.dtype, weights: torch.dtype) -> dict[str, Tensor]:
    """Return outputs, the gradient of the inputs, and the sums to which those of the adapters are added."""
    drawn = torch.Generator().manual_seed(1)
    linear = nn.Linear(INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(OUTPUTS, INPUTS, generator=drawn))
        linear.bias.copy_(torch.randn(OUTPUTS, generator=drawn))
    linear.requires_grad_(False)
    x = torch.randn(1, sum(LENGTHS), INPUTS, generator=drawn).to(dtype).requires_grad_(True)
    g = torch.randn(1, sum(LENGTHS), OUTPUTS, generator=drawn).to(dtype)
    segments, used = Segments("cpu"), segments_of(weights)
    with segments.used(used):
        y = AdaptedLinear(linear, "layer", segments)(x)
        y.backward(g)
    assert x.grad is not None
    sums = {
        f"{n}{m}": t for n, s in enumerate(used) for p in s.gradients.values() for m, t in zip("ab", p, strict=True)
    }
    return {"y": y.detach(), "x": x.grad, **sums}


@pytest.fixture
def grouped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take one of both ways whatever the device is, and see that it was taken."""
    taken: list[int] = []
    real = grouped_products.Stacks.of
    monkeypatch.setattr(adapted_linear, "may_group", lambda *_: request.param)

    def counted(*given: Any) -> grouped_products.Stacks:
        taken.append(1)
        return real(*given)

    monkeypatch.setattr(grouped_products.Stacks, "of", counted)
    yield
    assert len(taken) == (2 if request.param else 0)


@pytest.mark.parametrize(
    ("grouped", "dtype", "limit"),
    [(False, torch.float32, 1e-6), (False, torch.bfloat16, 0.02), (True, torch.bfloat16, 0.02)],
    indirect=["grouped"],
)
def test_each_way_computes_what_float64_does(
    grouped: None, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(dtype, torch.float32)
    with monkeypatch.context() as exact:
        exact.setattr(adapted_linear, "may_group", lambda *_: False)
        expected = results(torch.float64, torch.float64)
    assert found.keys() == {"y", "x", "0a", "0b", "2a", "2b"} == expected.keys()
    for name, value in expected.items():
        apart = float((found[name].double() - value).norm() / value.norm())
        assert apart <= limit, name


def test_products_are_grouped_only_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    used = segments_of(torch.float32)

    def may(
        tokens: int = 17, inputs: int = INPUTS, dtype: torch.dtype = torch.bfloat16, chosen: slice = slice(3)
    ) -> bool:
        return may_group(used[chosen], torch.empty(tokens, inputs), torch.empty(tokens, OUTPUTS, dtype=dtype))

    assert not may(), "on a CPU"
    monkeypatch.setattr(grouped_products, "_has_products", lambda _: True)
    assert may()
    assert not may(dtype=torch.float32)
    assert not may(inputs=20), "rows are not aligned"
    assert not may(tokens=18) and not may(chosen=slice(1, 3)), "tokens without an adapter in this layer"
    assert not may(tokens=5, chosen=slice(1)), "a single segment"


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_gpus_have_no_grouped_products(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert grouped_products._has_products.__wrapped__(torch.device("cuda")) == has
