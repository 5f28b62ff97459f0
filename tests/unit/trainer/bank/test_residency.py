"""Adapters beyond the slots: nothing of their state changes, wherever they have been."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opentinker.services.trainer.bank import adapter_files, residency
from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.spec import LoraSpec
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
    assert adapter.steps == 2 and set(expected) == set(adapter.vectors)
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
    assert second.residency.places["file"] == ["t0"] and second.residency.owners == {"t0": "tenant0"}
    del expected["partial"]  # no process continues half a command
    assert_same(second, expected)


def test_half_a_command_in_a_file_of_a_crashed_process_is_ignored(make_bank: MakeBank, tmp_path: Path) -> None:
    crashed = make_bank(store=tmp_path / "kept", slots=1, host_bytes=0)
    expected = busy(crashed)
    add_tenant(crashed, 1)
    assert crashed.residency.places["file"] == ["t0"]
    second = make_bank(store=tmp_path / "kept")
    del expected["partial"]
    assert_same(second, expected)


def fill_disk(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the store refuse these adapters."""

    def full(adapter: Adapter, path: Path) -> None:
        if adapter.name in names:
            raise OSError(errno.ENOSPC, "no space left")
        adapter_files.store(adapter, path)

    monkeypatch.setattr(residency, "adapter_files", SimpleNamespace(**{**vars(adapter_files), "store": full}))


def test_full_disk_loses_no_adapter(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank(slots=1, host_bytes=0)
    expected = busy(bank)
    with monkeypatch.context() as context:
        fill_disk(context, "t0")
        with pytest.raises(OSError, match="no space left"):
            bank.create("other", LoraSpec(rank=4), seed=0)
        assert "t0" in bank.residency and "other" not in bank.residency
    assert_same(bank, expected)


def test_close_stores_the_others_when_one_cannot_be_written(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    for number in range(3):
        add_tenant(bank, number)
    fill_disk(monkeypatch, "t0")
    with pytest.raises(OSError, match="adapters not stored: t0"):
        bank.close()
    assert bank.residency.places == {"slot": ["t0"], "host": [], "file": ["t1", "t2"]}


def test_file_of_an_earlier_state_is_not_restored(make_bank: MakeBank, tmp_path: Path) -> None:
    first = make_bank(store=tmp_path / "kept")
    for number in (0, 1):
        add_tenant(first, number)
    first.close()
    crashed = make_bank(store=tmp_path / "kept")
    crashed.run_pass([rows_of(0), rows_of(1, backward=False)])  # t1 is as in its file
    second = make_bank(store=tmp_path / "kept")
    assert second.residency.places["file"] == ["t1"]
    crashed.close()
    assert make_bank(store=tmp_path / "kept").residency.places["file"] == ["t0", "t1"]
    assert not list((tmp_path / "kept").glob("*.outdated"))


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
