"""Rows of several adapters in one pass: the gradient of an adapter does not depend on the others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter_bank import AdapterBank, StepResult
from opentinker.shared.nn.layout import join, layout
from tests.unit.trainer.bank.conftest import TENANTS, MakeBank, Task, add_tenant, rows_of, some_data, some_units


def filled(bank: AdapterBank, tenants: range) -> AdapterBank:
    for number in tenants:
        add_tenant(bank, number)
    return bank


def gradient(bank: AdapterBank, number: int) -> torch.Tensor:
    return bank.residency.bring([f"t{number}"])[0].gradient


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]])
def test_gradients_of_a_mixed_batch_equal_those_alone(make_bank: MakeBank, order: list[int]) -> None:
    """Rank, alpha, targets, init, loss, scale and temperature all differ, and the prompts are equal."""
    mixed, alone = filled(make_bank(), range(5)), filled(make_bank(), range(5))
    results = dict(zip(order, mixed.run_pass([rows_of(n) for n in order]), strict=True))
    for number in order:
        (expected,) = alone.run_pass([rows_of(number)])
        assert gradient(alone, number).abs().max() > 0
        assert relative(gradient(mixed, number), gradient(alone, number)) < 1e-6
        assert results[number].loss == pytest.approx(expected.loss, rel=1e-6)
    assert torch.count_nonzero(torch.stack([gradient(mixed, n).norm() for n in order])) == 5


def test_parts_of_a_command_add_up_to_the_command(make_bank: MakeBank) -> None:
    cut, whole = filled(make_bank(), range(2)), filled(make_bank(), range(2))
    rows = rows_of(1)
    whole.run_pass([rows])
    cut.run_pass([replace(rows, units=rows.units[:1], last=False), rows_of(0)])
    assert not gradient(cut, 1).any()
    cut.run_pass([replace(rows, units=rows.units[1:])])
    assert relative(gradient(cut, 1), gradient(whole, 1)) < 1e-6


def test_forward_alone_changes_nothing(make_bank: MakeBank) -> None:
    bank = filled(make_bank(), range(2))
    asked, trained = bank.run_pass([rows_of(0, backward=False), rows_of(1)])
    assert not gradient(bank, 0).any() and gradient(bank, 1).any()
    (again,) = bank.run_pass([rows_of(0)])
    assert asked.loss == pytest.approx(again.loss, rel=1e-6) and trained.is_finite


def test_steps_of_a_mixed_bank_equal_steps_alone(make_bank: MakeBank) -> None:
    """Several steps with different learning rates, clips and decays, in one call for all."""
    mixed, alone = filled(make_bank(), range(5)), filled(make_bank(), range(5))
    settings = {
        n: AdamSettings(lr=TENANTS[n][2], weight_decay=0.1 * (n % 2), clip=[None, 0.01][n % 2]) for n in range(5)
    }
    for step in range(3):
        mixed.run_pass([rows_of(n, step) for n in range(5)])
        mixed.optim_step([(f"t{n}", settings[n]) for n in range(5)])
    for n in range(5):
        for step in range(3):
            alone.run_pass([rows_of(n, step)])
            (result,) = alone.optim_step([(f"t{n}", settings[n])])
        assert isinstance(result, StepResult) and result.steps == 3
        found, expected = (bank.residency.bring([f"t{n}"])[0].weights for bank in (mixed, alone))
        assert (found - expected).norm() < 1e-2 * settings[n].lr * math.sqrt(found.numel())


@pytest.mark.parametrize("spoiled", ["weights", "rows"])
def test_nan_of_one_tenant_stays_with_it(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch, spoiled: str) -> None:
    """Its rows are the longest, so that shorter rows are padded next to them, and the first of the stream."""
    mixed, alone = filled(make_bank(), range(3)), filled(make_bank(), range(3))
    bad = rows_of(0)
    if spoiled == "weights":
        mixed.residency.bring(["t0"])[0].weights.fill_(float("nan"))
    else:
        bad = replace(bad, units=some_units(0, task=Task(scale=math.nan)))
    before = mixed.residency.bring(["t0"])[0].gradient.clone()
    results = mixed.run_pass([bad, rows_of(1), rows_of(2)])
    assert [result.is_finite for result in results] == [False, True, True]
    assert torch.equal(gradient(mixed, 0), before)
    for number in (1, 2):
        alone.run_pass([rows_of(number)])
        assert relative(gradient(mixed, number), gradient(alone, number)) < 1e-6


def test_a_refused_command_keeps_the_gradient_of_earlier_ones(make_bank: MakeBank) -> None:
    bank = filled(make_bank(), range(1))
    bank.run_pass([rows_of(0)])
    before = gradient(bank, 0).clone()
    overflow = replace(rows_of(0), units=some_units(0, task=Task(scale=2e38)))
    (result,) = bank.run_pass([overflow])
    assert not result.is_finite and torch.equal(gradient(bank, 0), before)


def test_padding_of_a_short_row_is_its_own(make_bank: MakeBank) -> None:
    plans = [
        layout([datum.ids_N for datum in data], [np.arange(len(datum.ids_N)) > 0 for datum in data])
        for data in (some_data(0), some_data(1))
    ]
    owner = torch.arange(len(join(plans).ids_N)) >= len(plans[0].ids_N)
    for bucket in join(plans).buckets:
        for row in bucket:
            assert len(set(owner[row].tolist())) == 1
