"""The number of slots comes from a measurement, and is shown with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opentinker.services.trainer.bank import adapter_bank, capacity, mixed_batch
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.capacity import MIB, Capacity, measure, usable_memory
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.runtime.memory import memory_bytes, peak_bytes, reset_peak
from opentinker.shared.types.errors import JobFailed
from tests.unit.trainer.bank.conftest import LIMITS, MakeBank


def test_slots_are_what_fits_next_to_base_and_largest_pass() -> None:
    assert Capacity(100 * MIB, 30 * MIB, 8 * MIB, 64).slots == 8
    assert Capacity(100 * MIB, 30 * MIB, 8 * MIB, 3).slots == 3
    assert Capacity(20 * MIB, 30 * MIB, 8 * MIB, 3).slots == 0
    assert str(Capacity(100 * MIB, 30 * MIB, 8 * MIB, 64)) == (
        "8 slots: 100 MiB usable - 30 MiB for base and largest pass, 8.00 MiB a slot, at most 64"
    )


def test_bank_measures_its_slots(make_bank: MakeBank) -> None:
    bank = make_bank(slots=None)
    assert bank.capacity is not None and bank.slots == bank.capacity.slots == adapter_bank.MOST_SLOTS
    assert 0 < bank.capacity.fixed_bytes < bank.capacity.usable_bytes <= memory_bytes()


def test_the_pass_that_is_measured_computes_all_that_jobs_may_ask_for(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def scores(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return token_scores(*arguments, **options)

    monkeypatch.setattr(mixed_batch, "token_scores", scores)
    measure(base, LIMITS, most=8)
    for options in asked:
        assert options["hits"] and options["entropy_gradient"] and isinstance(options["temperature"], torch.Tensor)
    assert len(asked) == 2


def test_base_without_room_for_a_slot_is_refused(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 2**20)
    with pytest.raises(JobFailed, match=r"no adapter fits next to the base: 0 slots: .* Lower bank_tokens"):
        measure(base, LIMITS, most=8)


def test_on_a_gpu_others_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 90 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free["bytes"], 100 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * MIB)
    assert usable_memory("cuda", 0.8) == 80 * MIB
    free["bytes"] = 30 * MIB
    assert usable_memory("cuda", 0.8) == 35 * MIB
    assert usable_memory("cpu", 0.5) == memory_bytes() // 2


def test_a_largest_pass_without_room_says_what_to_set(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(mixed_batch, "token_scores", full)
    with pytest.raises(JobFailed, match=r"largest pass over two adapters does not fit .* Lower bank_tokens"):
        measure(base, LIMITS, most=8)


def test_peak_includes_memory_that_was_given_back() -> None:
    reset_peak()
    before = peak_bytes()
    block = bytearray(64 * MIB)
    for place in range(0, len(block), 4096):
        block[place] = 1
    del block
    assert peak_bytes() - before > 50 * MIB
