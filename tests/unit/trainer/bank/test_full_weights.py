"""A model that trains all weights: the same gradient and steps as transformers and torch, and the same bits when it
has been away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.bank import adapter_files, pass_budget
from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import FullShape
from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.full_files import export_full, import_full
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.pass_part import PassOptions
from opentinker.shared.spec import LoraSpec
from tests.unit.trainer.bank.conftest import LIMITS, some_data, some_units

SETTINGS = AdamSettings(lr=1e-3, weight_decay=0.1, clip=0.5)


@pytest.fixture(scope="module")
def whole(small: Path) -> BaseModel:
    """A base of its own: adapters change the layers of theirs."""
    return BaseModel(str(small))


@pytest.fixture
def bank(whole: BaseModel, tmp_path: Path) -> AdapterBank:
    return AdapterBank(whole, tmp_path / "store", LIMITS, slots=1)


def rows(name: str, seed: int = 0, **options: bool) -> Rows:
    return Rows(name, some_units(seed), PassOptions(), **options)


def vector(bank: AdapterBank, name: str, what: str = "weights") -> Tensor:
    (found,) = bank.residency.bring([name])
    return found.vectors[what]


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """The loss of `some_units`, row by row, by transformers."""
    total = torch.zeros(())
    for row in some_data(seed):
        ids = torch.from_numpy(row.ids_N).long()[None]
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        chosen = logprobs.gather(-1, torch.from_numpy(row.targets_M).long()[:, None])[:, 0]
        total = total - (chosen * torch.from_numpy(row.factor_M)).sum()
    return total


def test_gradient_and_steps_are_those_of_transformers_and_torch(bank: AdapterBank, small: Path) -> None:
    bank.create("m", None, 0, owner="t")
    model = plain(small)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    for step in range(3):
        optimizer.zero_grad()
        expected = loss_of(model, step)
        expected.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        (result,) = bank.run_pass([rows("m", step)])
        assert result.loss == pytest.approx(expected.item(), rel=1e-5) and result.is_finite
        found = vector(bank, "m", "gradient")
        assert float((found - gradient).norm() / gradient.norm()) < 1e-5
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        bank.optim_step([("m", SETTINGS)])
    after = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert float((vector(bank, "m") - after).abs().max()) < 1e-5
    assert float((vector(bank, "m") - bank.base.full_weights("x").weights).abs().max()) > 1e-3


def test_the_base_stays_as_it_is_also_after_a_pass_that_fails(bank: AdapterBank) -> None:
    bank.create("m", None, 0, owner="t")
    before = {name: tensor.clone() for name, tensor in bank.base.causal.named_parameters()}
    bank.run_pass([rows("m")])
    bank.optim_step([("m", SETTINGS)])

    def fail(_: object) -> Tensor:
        raise ValueError("the loss fails")

    broken = rows("m")
    for unit in broken.units:
        object.__setattr__(unit, "loss", fail)
    with pytest.raises(ValueError, match="the loss fails"):
        bank.run_pass([broken])
    for name, parameter in bank.base.causal.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.requires_grad and parameter.grad is None, name
    assert not vector(bank, "m", "gradient").any()


def test_models_take_turns_and_each_is_as_if_it_were_alone(bank: AdapterBank, tmp_path: Path) -> None:
    alone = AdapterBank(bank.base, tmp_path / "alone", LIMITS, slots=1)
    alone.create("a", None, 0)
    for name in ("a", "b"):
        bank.create(name, None, 0, owner=name)
    for step in range(3):
        alone.run_pass([rows("a", step)])
        bank.run_pass([rows("a", step)])
        bank.run_pass([rows("b", 50 + step)])
        for one, name in ((alone, "a"), (bank, "a"), (bank, "b")):
            one.optim_step([(name, SETTINGS)])
    for what in ("weights", "exp_avg", "exp_avg_sq"):
        assert torch.equal(vector(bank, "a", what), vector(alone, "a", what))
        assert not torch.equal(vector(bank, "b", what), vector(bank, "a", what))


async def test_another_tenant_changes_no_bit_of_a_model(
    whole: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command has the same passes whoever sends beside it, and however fast passes are."""
    monkeypatch.setattr(pass_budget, "SMALLEST", 1)
    monkeypatch.setattr(pass_budget, "SHARED_PASS_S", 1e-9)
    found = {}
    for tenants in (1, 2):
        bank = AdapterBank(whole, tmp_path / f"of-{tenants}", LIMITS, slots=1)
        async with BankLoop(bank) as loop:
            names = [f"m{number}" for number in range(tenants)]
            for name in names:
                await loop.create(name, name, None, 0)
            for step in range(2):
                units = some_units(step, rows=24)
                assert sum(unit.tokens for unit in units) > 1.5 * LIMITS.step_tokens
                await asyncio.gather(*(loop.run_units(name, name, units, PassOptions()) for name in names))
                await asyncio.gather(*(loop.optim_step(name, name, SETTINGS) for name in names))
            found[tenants] = (await loop.read("m0", "m0")).weights
    assert torch.equal(found[1], found[2])


def test_a_stored_one_is_the_same_bit_for_bit(bank: AdapterBank, tmp_path: Path) -> None:
    bank.create("m", None, 0, owner="t")
    bank.run_pass([rows("m")])
    bank.optim_step([("m", SETTINGS)])
    bank.run_pass([rows("m", 1)])
    (adapter,) = bank.residency.bring(["m"])
    adapter_files.store(adapter, tmp_path / "m.safetensors")
    found = adapter_files.restore("m", tmp_path / "m.safetensors")
    assert found.shape == adapter.shape and found.steps == 1 and found.owner == "t"
    for what, tensor in adapter.vectors.items():
        assert torch.equal(found.vectors[what], tensor), what


def test_its_directory_is_one_of_transformers_and_is_read_again(bank: AdapterBank, tmp_path: Path) -> None:
    bank.create("m", None, 0)
    bank.run_pass([rows("m")])
    bank.optim_step([("m", SETTINGS)])
    (adapter,) = bank.residency.bring(["m"])
    (tmp_path / "saved").mkdir()
    export_full(bank.base, adapter, tmp_path / "saved")
    (result,) = bank.run_pass([rows("m", 3, backward=False)])
    with torch.no_grad():
        loaded = loss_of(plain(tmp_path / "saved"), 3)
    assert loaded.item() == pytest.approx(result.loss, rel=1e-5)
    assert isinstance(adapter.shape, FullShape)
    assert torch.equal(import_full(tmp_path / "saved", adapter.shape), adapter.weights)
    with pytest.raises(Refused, match="other parameters"):
        import_full(tmp_path / "saved", FullShape({"model.embed_tokens.weight": (2, 3)}))


def test_it_is_refused_beside_adapters_and_where_it_does_not_fit(
    whole: BaseModel, bank: AdapterBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = AdapterBank(whole, tmp_path / "shared", LIMITS, slots=2)
    with pytest.raises(Refused, match="for them alone"):
        shared.create("m", None, 0)
    module = "opentinker.services.trainer.bank.adapter_bank.device_memory"
    monkeypatch.setattr(module, lambda _: bank.residency.host_bytes + 2**26)
    with pytest.raises(Refused, match="name"):
        bank.create("not/a/name", None, 0)
    assert not bank.trains_full, "it has had none"
    bank.create("fits", None, 0)
    assert bank.trains_full
    monkeypatch.setattr(module, lambda _: bank.residency.host_bytes + 1000)
    with pytest.raises(Refused, match=r"takes 0\.0 GiB, and the device has 0\.0 for it"):
        bank.create("m", None, 0)
    monkeypatch.undo()
    bank.create("lora", LoraSpec(rank=2), 0)  # its layers are adapted from now on
    with pytest.raises(Refused, match="not of the model"):
        bank.add(AdapterBank.read(_made(tmp_path, str(whole.name)), "m"))


def test_beside_a_gpu_host_memory_must_hold_the_copy_and_its_file(
    bank: AdapterBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "opentinker.services.trainer.bank.adapter_bank"
    monkeypatch.setattr(f"{module}.device_memory", lambda _: 2**40)
    needed = 8 * bank.base.full_weights("x").weights.nbytes
    for spare, device in ((needed - 1, "cpu"), (needed, "cuda")):
        monkeypatch.setattr(f"{module}.memory_bytes", lambda spare=spare: bank.residency.host_bytes + spare)
        monkeypatch.setattr(bank.base, "device", device)
        bank._require_alone()
    monkeypatch.setattr(f"{module}.memory_bytes", lambda: bank.residency.host_bytes + needed - 1)
    with pytest.raises(Refused, match="of host memory"):
        bank.create("m", None, 0)


def _made(place: Path, base: str) -> AdapterBank:
    made = AdapterBank(BaseModel(base), place / "made", LIMITS, slots=1)
    made.create("m", None, 0)
    return made
