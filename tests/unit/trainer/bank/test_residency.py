"""Adapters beyond the slots: nothing of their state changes, wherever they have been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.types.errors import Conflict, NotFound
from tests.unit.trainer.bank.conftest import MakeBank, add_tenant, rows_of


def busy(bank: AdapterBank) -> dict[str, torch.Tensor]:
    """Give t0 moments, a gradient sum and the gradient of half a command; returns copies."""
    add_tenant(bank, 0)
    for _ in range(2):
        bank.run_pass([rows_of(0)])
        bank.optim_step([("t0", AdamSettings(lr=1e-2))])
    bank.run_pass([rows_of(0)])
    bank.run_pass([rows_of(0, 1, last=False)])
    return {name: vector.clone() for name, vector in bank.residency.bring(["t0"])[0].vectors.items()}


def assert_same(bank: AdapterBank, expected: dict[str, torch.Tensor]) -> None:
    (adapter,) = bank.residency.bring(["t0"])
    assert adapter.steps == 2 and set(expected) == {"weights", "gradient", "exp_avg", "exp_avg_sq", "partial"}
    for name, vector in expected.items():
        assert vector.any() and torch.equal(adapter.vectors[name], vector), name


@pytest.mark.parametrize(("host_bytes", "place"), [(2**30, "host"), (0, "file")])
def test_evicted_adapter_comes_back_bit_for_bit(make_bank: MakeBank, host_bytes: int, place: str) -> None:
    bank = make_bank(slots=2, host_bytes=host_bytes)
    expected = busy(bank)
    for number in (1, 2):
        add_tenant(bank, number)
    assert bank.residency.places[place] == ["t0"] and bank.residency.places["slot"] == ["t1", "t2"]
    assert_same(bank, expected)
    assert bank.residency.places["slot"] == ["t2", "t0"] and bank.residency.places[place] == ["t1"]


def test_stored_adapters_are_found_by_the_next_process(make_bank: MakeBank, tmp_path: Path) -> None:
    first = make_bank(store=tmp_path / "kept")
    expected = busy(first)
    first.close()
    second = make_bank(store=tmp_path / "kept")
    assert second.residency.places["file"] == ["t0"]
    assert_same(second, expected)


def test_files_are_safetensors_and_damage_is_named(make_bank: MakeBank) -> None:
    bank = make_bank()
    busy(bank)
    bank.close()
    (path,) = bank.residency.store.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Refused, match="stored adapter 't0' cannot be read"):
        bank.residency.bring(["t0"])


def test_names_are_unique_in_all_places_and_removal_is_complete(make_bank: MakeBank) -> None:
    bank = make_bank(slots=1, host_bytes=0)
    for number in (0, 1):
        add_tenant(bank, number)
    with pytest.raises(Conflict, match="choose another name"):
        add_tenant(bank, 0)
    bank.remove("t0")
    assert not list(bank.residency.store.iterdir()) or bank.residency.places["file"] == ["t1"]
    for _ in range(2):
        with pytest.raises(NotFound):
            bank.residency.bring(["t0"])
    assert bank.residency.bring(["t1"])[0].name == "t1"
