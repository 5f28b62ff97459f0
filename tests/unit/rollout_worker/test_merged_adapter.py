"""An adapter merged into its base: the arithmetic, without an engine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from opentinker.services.rollout_worker.engines.merged_adapter import MergeableBase, dithered, pairs_of
from opentinker.shared.types.errors import TransportError

CPU = torch.device("cpu")
NAME = "model.layers.0.self_attn.q_proj"


def adapter(seed: int, out: int = 48, into: int = 32, rank: int = 4, module: str = NAME) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, into),
        f"base_model.model.{module}.lora_B.weight": torch.randn(out, rank),
    }


class Base:
    """Weights on a disk that counts how often it is read."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.weights = {
            f"{NAME}.weight": torch.randn(48, 32).to(dtype),
            "model.norm.weight": torch.ones(32, dtype=dtype),
        }
        self.reads = 0

    def read(self) -> Iterable[tuple[str, torch.Tensor]]:
        self.reads += 1
        yield from self.weights.items()


def merged(base: MergeableBase, tensors: dict[str, torch.Tensor], scale: float = 2.0) -> dict[str, torch.Tensor]:
    pairs = pairs_of(tensors.items())
    base.keep(pairs)
    return dict(base.merge(pairs, scale, CPU))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_every_version_is_the_base_and_its_adapter_alone(stored: torch.dtype) -> None:
    disk = Base(stored)
    original = disk.weights[f"{NAME}.weight"].float().clone()
    base = MergeableBase(disk.read, torch.float32, whole=False)
    for seed in range(20):
        a, b = adapter(seed).values()
        found = merged(base, adapter(seed))
        assert list(found) == [f"{NAME}.weight"]
        torch.testing.assert_close(found[f"{NAME}.weight"], original + 2.0 * b @ a, rtol=1e-6, atol=1e-5)
    zero = {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in adapter(3).items()}
    assert torch.equal(merged(base, zero)[f"{NAME}.weight"], original), "20 versions have left nothing behind"
    assert disk.reads == 1
    disk.weights[f"{NAME}.weight"].zero_()
    assert torch.equal(merged(base, zero)[f"{NAME}.weight"], original), "what is kept is a copy"


def test_weights_without_an_adapter_come_where_all_are_asked_for() -> None:
    disk = Base(torch.float32)
    found = merged(MergeableBase(disk.read, torch.float32, whole=True), adapter(1))
    assert found.keys() == disk.weights.keys()
    assert torch.equal(found["model.norm.weight"], torch.ones(32))


def test_an_adapter_of_fewer_layers_gives_the_others_their_base_back() -> None:
    disk = Base(torch.float32)
    other = "model.layers.0.self_attn.k_proj"
    disk.weights[f"{other}.weight"] = torch.randn(48, 32)
    base = MergeableBase(disk.read, torch.float32, whole=False)
    merged(base, {**adapter(1), **adapter(2, module=other)})
    found = merged(base, adapter(3))
    assert torch.equal(found[f"{other}.weight"], disk.weights[f"{other}.weight"])


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (adapter(1, module="model.layers.9.mlp.up_proj"), r"model\.layers\.9\.mlp\.up_proj\.weight.*the base has none"),
        (adapter(1, out=32), r"\[32, 32\]; the base has \[48, 32\]"),
        (dict([*adapter(1).items()][:1]), "only one factor came"),
        ({"base_model.model.score.weight": torch.ones(1)}, "neither factor"),
    ],
    ids=["unknown", "shape", "half", "other"],
)
def test_an_adapter_that_does_not_fit_is_named(tensors: dict[str, torch.Tensor], problem: str) -> None:
    with pytest.raises(TransportError, match=problem):
        merged(MergeableBase(Base(torch.float32).read, torch.float32, whole=False), tensors)


def test_rounding_to_bfloat16_keeps_small_changes_on_average_and_exact_values() -> None:
    torch.manual_seed(0)
    base = torch.randn(400, 300).to(torch.bfloat16)
    assert torch.equal(dithered(base.float(), "w"), base)
    step = base.float().abs() * 2**-8
    small = base.float() + 0.1 * step
    assert torch.equal(small.to(torch.bfloat16), base), "to the nearest, nothing would be left of it"
    rounded = dithered(small, "w")
    kept = (rounded.float() - base.float()).sum() / (small - base.float()).sum()
    assert 0.9 < float(kept) < 1.1
    assert torch.equal(rounded, dithered(small, "w")) and not torch.equal(rounded, dithered(small, "v"))
    assert float((rounded.float() - small).abs().max() / base.float().abs().max()) < 2**-7
