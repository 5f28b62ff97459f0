"""An adapter of a bank is a PEFT adapter: the same first weights, the same files, the same logits."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.bank import adapter_files
from opentinker.services.trainer.bank.adapter_bank import Rows
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.pass_part import PassOptions
from opentinker.services.trainer.tinker.losses import Columns
from opentinker.shared.spec import LoraSpec
from tests.support.learning import torch_learner
from tests.unit.trainer.bank.conftest import MakeBank, Task, add_tenant, some_data, some_units


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 4, "alpha": 8.0},
        {"rank": 8, "alpha": 4.0, "target_modules": ["q_proj", "down_proj"], "init": "gaussian"},
        {"rank": 4, "alpha": 8.0, "init": "orthogonal"},
    ],
    ids=lambda lora: lora.get("init", "kaiming"),
)
def test_first_weights_are_those_of_a_lora_job(base: BaseModel, small: Path, lora: dict[str, Any]) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    adapter = base.fresh_adapter("a", LoraSpec(**lora), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    learner = torch_learner(small, model={"lora": lora}, train={"seed": 3})
    state = get_peft_model_state_dict(learner.model)
    assert torch.equal(adapter.weights, torch.cat([tensor.flatten() for tensor in state.values()]))


def test_exported_adapter_has_pefts_logits(make_bank: MakeBank, small: Path, tmp_path: Path) -> None:
    bank = make_bank()
    for number in (1, 3):
        add_tenant(bank, number)
    results = bank.run_pass([Rows(f"t{n}", some_units(7), PassOptions(), backward=False) for n in (1, 3)])
    for number, result in zip((1, 3), results, strict=True):
        bank.export_peft(f"t{number}", tmp_path / f"{number}")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small), tmp_path / f"{number}").eval()
        plain = AutoModelForCausalLM.from_pretrained(small)
        for datum, found in zip(some_data(7), result.logprobs, strict=True):
            expected, unadapted = (_logprobs(one, datum) for one in (model, plain))
            torch.testing.assert_close(torch.tensor(found), expected.detach(), atol=1e-5, rtol=0)
            assert (expected - unadapted).abs().max() > 1e-3


def _logprobs(model: Any, datum: Columns) -> torch.Tensor:
    ids_N, targets_N = (torch.tensor(ids.tolist()) for ids in (datum.ids_N, datum.targets_M))
    logits = model(input_ids=ids_N[None]).logits[0].float()
    return logits.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]


def test_import_restores_what_was_exported(make_bank: MakeBank, tmp_path: Path) -> None:
    bank = make_bank()
    add_tenant(bank, 1)
    bank.export_peft("t1", tmp_path)
    bank.import_peft("again", tmp_path)
    first, again = bank.residency.bring(["t1", "again"])
    assert torch.equal(first.weights, again.weights) and first.shape == again.shape and again.steps == 0
    assert first.config["target_modules"] == again.config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"r": 5}, "is not of the model"),
        ({"target_modules": ["nothing"]}, "no module 'nothing'|not found"),
        ({"r": "x"}, "cannot be read"),
        ({"padding": "x" * 2**20}, "at most 1048576 are allowed"),
    ],
)
def test_unusable_adapters_are_refused(
    make_bank: MakeBank, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    bank = make_bank()
    add_tenant(bank, 1)
    bank.export_peft("t1", tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(Refused, match=problem):
        bank.import_peft("again", tmp_path)
    assert "again" not in bank.residency


def test_shapes_are_checked_before_tensors_are_loaded(
    make_bank: MakeBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    add_tenant(bank, 1)
    bank.export_peft("t1", tmp_path)
    save_file({"large": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    monkeypatch.setattr(adapter_files, "load_file", lambda _: pytest.fail("loaded"))
    with pytest.raises(Refused, match="9 tensors differ, such as"):
        bank.import_peft("again", tmp_path)


def test_failed_export_leaves_the_earlier_one(
    make_bank: MakeBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    add_tenant(bank, 1)
    bank.export_peft("t1", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left", str(path))

    monkeypatch.setattr(os, "fsync", full)
    bank.residency.bring(["t1"])[0].weights += 1
    with pytest.raises(OSError, match="no space left"):
        bank.export_peft("t1", tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("number", [0, 1])
def test_gradient_is_pefts(make_bank: MakeBank, small: Path, tmp_path: Path, number: int) -> None:
    """The scaling is 2 and 0.5."""
    bank, data = make_bank(), some_data(7)
    add_tenant(bank, number)
    bank.run_pass([Rows(f"t{number}", Task(scale=0.5).units(data), PassOptions())])
    (adapter,) = bank.residency.bring([f"t{number}"])
    assert adapter.lora.scaling == [2.0, 0.5][number]
    bank.export_peft(f"t{number}", tmp_path / "peft")
    plain = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, tmp_path / "peft", is_trainable=True).eval()
    for datum in data:
        (_logprobs(model, datum) * torch.tensor(datum.factor_M)).sum().mul(-0.5).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for layer, pair in adapter.lora.pairs(adapter.gradient).items():
        for matrix, found in (("lora_A", pair.a), ("lora_B", pair.b)):
            gradient = expected.pop(f"base_model.model.{layer}.{matrix}.default.weight")
            assert gradient is not None and gradient.norm() > 0
            assert (found - gradient).norm() / gradient.norm() < 1e-6, (layer, matrix)
    assert not expected


def test_adapters_that_cannot_share_a_base_are_refused(make_bank: MakeBank) -> None:
    bank = make_bank()
    for lora, problem in (
        (LoraSpec(rank=17), "rank 17 is above the largest rank of this bank, 16"),
        (LoraSpec(rank=4, dropout=0.1), "no dropout"),
        (LoraSpec(rank=4, target_modules=["absent"]), "absent"),
        (LoraSpec(rank=4, target_modules=["lm_head"]), "output layer"),
    ):
        with pytest.raises(Refused, match=problem):
            bank.create("a", lora, seed=0)
    with pytest.raises(Refused, match="use 1 to 128 letters"):
        bank.create("../a", LoraSpec(rank=4), seed=0)
    bank.create("a", LoraSpec(rank=4), seed=0)
