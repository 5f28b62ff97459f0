"""Weights of linear layers in oneDNN's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def layer_of(weight: torch.Tensor) -> Any:
    layer: Any = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    layer.weight.data = weight
    layer.cpu_linear = torch.nn.functional.linear
    return layer


def test_layers_multiply_with_the_weights_that_were_packed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.services.rollout_worker.engines import packed_layers

    torch.manual_seed(0)
    first, second, x = torch.randn(48, 32), torch.randn(48, 32), torch.randn(5, 32)
    layer = layer_of(first.clone())
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    packed_layers.pack(model)
    assert layer.cpu_linear is torch.nn.functional.linear, "a small model is left alone"

    monkeypatch.setattr(packed_layers, "SMALL_BYTES", 0)
    packed_layers.pack(model)
    assert isinstance(layer.cpu_linear, packed_layers.PackedLinear)
    with torch.no_grad():
        layer.weight.copy_(second)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ first.T, rtol=1e-5, atol=1e-5)
    packed_layers.pack(model)
    bias = torch.randn(48)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, bias), x @ second.T + bias, rtol=1e-5, atol=1e-5)


def test_a_model_that_takes_too_much_memory_twice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.services.rollout_worker.engines import packed_layers

    monkeypatch.setattr(packed_layers, "SMALL_BYTES", 0)
    monkeypatch.setattr(packed_layers, "MEMORY_SHARE", 0.0)
    layer = layer_of(torch.randn(48, 32))
    packed_layers.pack(torch.nn.Sequential(layer))
    assert layer.cpu_linear is torch.nn.functional.linear
