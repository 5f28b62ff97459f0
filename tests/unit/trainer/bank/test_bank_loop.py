"""Several tenants in one bank: their runs are those of a tenant alone, and a bad one harms itself alone."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows
from opentinker.services.trainer.bank.bank_commands import ForwardResult
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.mixed_batch import PieceResult
from opentinker.services.trainer.bank.pass_part import PassOptions, Unit
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.errors import NotFound
from tests.conftest import WAIT_S, until
from tests.unit.trainer.bank.conftest import LIMITS, TENANTS, MakeBank, Task, add_tenant, some_data, some_units

LORA = LoraSpec(rank=4, alpha=8.0)


async def run_tenant(loop: BankLoop, number: int, steps: int = 3) -> list[float]:
    """Train as a client does: the step is sent before the gradient's result is there. Returns the losses."""
    _, task, lr = TENANTS[number % len(TENANTS)]
    losses = []
    for step in range(steps):
        units = some_units(100 * number + step, rows=9, task=task)
        forward = loop.run_units(f"tenant{number}", f"t{number}", units, task.pass_options)
        stepping = loop.optim_step(f"tenant{number}", f"t{number}", AdamSettings(lr=lr, clip=1.0))
        result, stepped = await asyncio.gather(forward, stepping)
        assert stepped.steps == step + 1
        losses.append(result.loss)
    return losses


async def curves(
    make_bank: MakeBank, numbers: range, *, deterministic: bool, files: bool = False
) -> tuple[dict[int, list[float]], AdapterBank]:
    bank = make_bank(slots=3, host_bytes=0 if files else 2**30)
    for number in numbers:
        add_tenant(bank, number, deterministic=deterministic)
    async with BankLoop(bank) as loop:
        found = await asyncio.gather(*(run_tenant(loop, number) for number in numbers))
    return dict(zip(numbers, found, strict=True)), bank


def weights(bank: AdapterBank, number: int) -> torch.Tensor:
    return bank.residency.bring([f"t{number}"])[0].weights


@pytest.mark.parametrize("deterministic", [True, False])
async def test_eight_tenants_on_three_slots_equal_eight_single_runs(make_bank: MakeBank, deterministic: bool) -> None:
    """Bit for bit in slices; within rounding in mixed passes. Adapters wander between slots, host memory and files."""
    together, bank = await curves(make_bank, range(8), deterministic=deterministic, files=deterministic)
    for number in range(8):
        alone, single = await curves(make_bank, range(number, number + 1), deterministic=deterministic)
        found, expected = weights(bank, number), weights(single, number)
        if deterministic:
            assert together[number] == alone[number] and torch.equal(found, expected)
        else:
            assert together[number] == pytest.approx(alone[number], rel=1e-3)
            one_step = TENANTS[number % len(TENANTS)][2] * math.sqrt(found.numel())
            assert (found - expected).norm() < 1e-2 * one_step


async def test_waits_for_other_jobs_are_told_from_those_for_policies_of_the_same_job(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    run_pass = bank.run_pass

    def slow(rows: Sequence[Rows]) -> Sequence[PieceResult]:
        time.sleep(0.05)
        return run_pass(rows)

    monkeypatch.setattr(bank, "run_pass", slow)
    async with BankLoop(bank) as loop:
        names = ("j.first", "j.second", "other")
        with loop.other_jobs.one_job(names[:2]):
            for name in names:
                await loop.create(name, name, LORA, seed=0, deterministic=True)  # each has passes alone
            await asyncio.gather(*(loop.run_units(name, name, some_units(0, rows=1), PassOptions()) for name in names))
        assert loop.waited_s["j.second"] > 0.04 and loop.other_jobs["j.second"] == 0.0
        assert loop.other_jobs["other"] > 0.08


async def test_bad_commands_are_refused_and_change_nothing(make_bank: MakeBank) -> None:
    bank = make_bank()
    long = some_units(0, rows=LIMITS.command_tokens // 8)
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        with pytest.raises(Refused, match="send them in several commands"):
            await loop.run_units("x", "a", long, PassOptions())
        for settings, problem in (
            (AdamSettings(lr=-1.0), "lr = -1.0"),
            (AdamSettings(lr=1.0, beta2=1.0), "beta2 = 1.0"),
            (AdamSettings(lr=1.0, clip=0.0), "clip = 0.0"),
        ):
            with pytest.raises(Refused, match=problem):
                await loop.optim_step("x", "a", settings)
        with pytest.raises(NotFound, match="no adapter 'b'"):
            await loop.run_units("x", "b", some_units(0), PassOptions())
        (adapter,) = bank.residency.bring(["a"])
        assert adapter.steps == 0 and not adapter.gradient.any()


async def test_longest_datum_is_accepted_and_a_longer_one_refused(make_bank: MakeBank) -> None:
    (short,) = some_data(0, rows=1)

    def of(tokens: int) -> list[Unit]:
        columns: dict[str, Any] = {
            name: np.resize(getattr(short, name), tokens) for name in ("ids_N", "targets_M", "factor_M")
        }
        return Task().units([replace(short, **columns)])

    async with BankLoop(make_bank()) as loop:
        await loop.create("x", "a", LORA, seed=0)
        result = await loop.run_units("x", "a", of(LIMITS.datum_tokens), PassOptions())
        assert len(result.logprobs[0]) == LIMITS.datum_tokens
        with pytest.raises(Refused, match="datum 0 has 33 tokens, and at most 32"):
            await loop.run_units("x", "a", of(LIMITS.datum_tokens + 1), PassOptions())


async def test_nan_weights_and_overflow_harm_their_tenant_alone(make_bank: MakeBank) -> None:
    bank = make_bank()
    for number in (0, 1, 2):
        add_tenant(bank, number)
    bank.residency.bring(["t0"])[0].weights[3] = float("nan")
    async with BankLoop(bank) as loop:
        spoiled, fine, large = await asyncio.gather(
            loop.run_units("tenant0", "t0", some_units(0), PassOptions()),
            loop.run_units("tenant1", "t1", some_units(1), PassOptions()),
            loop.run_units("tenant2", "t2", some_units(2, task=Task(scale=1e38)), PassOptions()),
            return_exceptions=True,
        )
        assert isinstance(spoiled, Refused) and "loss nan" in str(spoiled)
        assert isinstance(large, Refused) and isinstance(fine, ForwardResult) and np.isfinite(fine.loss)
        steps = await asyncio.gather(*(loop.optim_step(f"tenant{n}", f"t{n}", AdamSettings(lr=1e-3)) for n in (1, 2)))
        assert steps[0].grad_norm > 0 == steps[1].grad_norm


async def test_damaged_file_harms_its_adapter_alone(make_bank: MakeBank) -> None:
    bank = make_bank(slots=2, host_bytes=0)
    for number in (0, 1, 2):
        add_tenant(bank, number)
    (path,) = bank.residency.store.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    async with BankLoop(bank) as loop:
        damaged, fine, no_step, step = await asyncio.gather(
            *(loop.run_units(f"tenant{n}", f"t{n}", some_units(n), PassOptions()) for n in (0, 1)),
            *(loop.optim_step(f"tenant{n}", f"t{n}", AdamSettings(lr=1e-3)) for n in (0, 1)),
            return_exceptions=True,
        )
    for refused in (damaged, no_step):
        assert isinstance(refused, Refused) and "'t0' cannot be read" in str(refused)
    assert not isinstance(fine, BaseException) and not isinstance(step, BaseException)


async def test_gradient_sum_that_overflows_is_dropped_with_its_step(make_bank: MakeBank) -> None:
    bank = make_bank()
    for number in (0, 1):
        add_tenant(bank, number)
    adapters = bank.residency.bring(["t0", "t1"])
    before = adapters[0].weights.clone()
    adapters[0].gradient.fill_(3e38)
    adapters[1].gradient.fill_(1.0)
    async with BankLoop(bank) as loop:
        refused, stepped = await asyncio.gather(
            *(loop.optim_step(f"tenant{n}", f"t{n}", AdamSettings(lr=1e-3)) for n in (0, 1)), return_exceptions=True
        )
        assert isinstance(refused, Refused) and "norm of the gradient is inf" in str(refused)
        assert not isinstance(stepped, BaseException) and stepped.steps == 1
        assert torch.equal(adapters[0].weights, before) and not adapters[0].gradient.any()


async def test_a_flood_is_bounded_and_others_pass_it(make_bank: MakeBank) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        for name in ("flood", "small"):
            await loop.create(name, name, LORA, seed=0)
        data = some_units(0, rows=24, shared=False)
        order: list[str] = []

        async def send(tenant: str, rows: int) -> None:
            await loop.run_units(tenant, tenant, data[:rows], PassOptions())
            order.append(tenant)

        flood = [asyncio.create_task(send("flood", 24)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="wait for results before sending more"):
            await loop.run_units("flood", "flood", data, PassOptions())
        small = asyncio.create_task(send("small", 1))
        await asyncio.sleep(0)
        assert re.fullmatch("slots 2/8, [34] waiting for tokens", loop.queue_reason)
        await asyncio.gather(small, *flood)
        assert order == ["small", "flood", "flood", "flood"]
        assert loop.queue_reason == "slots 2/8"


async def test_cancelled_command_leaves_no_part_of_its_gradient(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, go = make_bank(), threading.Event()
    run_pass = bank.run_pass

    def held(rows: Sequence[Rows]) -> list[PieceResult]:
        found = run_pass(rows)
        go.wait(WAIT_S)
        return found

    monkeypatch.setattr(bank, "run_pass", held)
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        cancelled = asyncio.create_task(loop.run_units("x", "a", some_units(0, rows=24, shared=False), PassOptions()))
        await until(lambda: any(waiting.taken for waiting in loop._queue))
        cancelled.cancel()
        go.set()
        await loop.run_units("x", "a", some_units(1), PassOptions())
        (found,) = bank.residency.bring(["a"])
        gradient = found.gradient.clone()
    alone = make_bank()
    async with BankLoop(alone) as loop:
        await loop.create("x", "a", LORA, seed=0)
        await loop.run_units("x", "a", some_units(1), PassOptions())
        torch.testing.assert_close(gradient, alone.residency.bring(["a"])[0].gradient, rtol=1e-4, atol=1e-6)


async def test_export_and_removal_have_their_place_among_commands(make_bank: MakeBank, tmp_path: Path) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        asked = [
            loop.run_units("x", "a", some_units(0), PassOptions()),
            loop.optim_step("x", "a", AdamSettings(lr=0.1)),
            loop.export_peft("x", "a", tmp_path),
            loop.optim_step("x", "a", AdamSettings(lr=0.1)),
            loop.remove("x", "a"),
        ]
        await asyncio.gather(*asked)
        with pytest.raises(NotFound):
            await loop.export_peft("x", "a", tmp_path)
        await loop.import_peft("x", "b", tmp_path)
        await loop.create("x", "fresh", LORA, seed=0)
        exported, fresh = bank.residency.bring(["b", "fresh"])
        moved = (exported.weights - fresh.weights).abs().max()
        assert moved == pytest.approx(0.1, rel=0.01)  # one step of Adam moves by lr


async def test_many_adapters_that_a_tenant_adds_at_once_delay_each_pass_and_step_of_others_by_one_of_them(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, order, go = make_bank(slots=40), list[str](), threading.Event()
    create, run_pass, optim_step = bank.create, bank.run_pass, bank.optim_step

    def created(name: str, *arguments: Any, **options: Any) -> None:
        order.append(name)
        assert go.wait(WAIT_S)
        create(name, *arguments, **options)

    def passed(rows: Sequence[Rows]) -> list[PieceResult]:
        order.append("pass")
        return run_pass(rows)

    def stepped(settings: Any) -> Any:
        order.append("step")
        return optim_step(settings)

    bank.create("b", LORA, 0, owner="blue")
    monkeypatch.setattr(bank, "create", created)
    monkeypatch.setattr(bank, "run_pass", passed)
    monkeypatch.setattr(bank, "optim_step", stepped)
    async with BankLoop(bank) as loop, asyncio.TaskGroup() as tasks:
        for number in range(30):
            tasks.create_task(loop.create("red", f"r{number}", LORA, seed=number))
        await until(lambda: order == ["r0"])
        for number in range(5):
            tasks.create_task(loop.run_units("blue", "b", some_units(number), PassOptions()))
            tasks.create_task(loop.optim_step("blue", "b", AdamSettings(lr=0.1)))
        tasks.create_task(loop.create("green", "g", LORA, seed=0))
        await until(lambda: len(loop._queue) == 10)
        go.set()
    added = ["r0", "g", *(f"r{number}" for number in range(1, 30))]
    each = [one for pair in zip(added, 5 * ["pass", "step"], strict=False) for one in pair]
    assert order == [*each, *added[10:]]


async def test_commands_do_not_outlive_a_crashed_loop(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank()

    def crash(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bank, "run_pass", crash)
    with pytest.raises(RuntimeError, match="no such kernel"):
        async with BankLoop(bank) as loop:
            await loop.create("x", "a", LORA, seed=0)
            with pytest.raises(asyncio.CancelledError):
                await loop.run_units("x", "a", some_units(0), PassOptions())


def test_the_program_of_the_documentation_runs(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "shared-trainers.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    program = program.replace("runs/models/tiny", str(small)).replace("runs/bank", str(tmp_path / "bank"))
    exec(compile(program, "shared-trainers.md", "exec"), {})
    loss, norm = map(float, capsys.readouterr().out.split())
    assert loss > 0 and norm > 0
