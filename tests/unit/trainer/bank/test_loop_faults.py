"""Commands that are cancelled, fail, are of another tenant or are too many: nothing of them reaches other commands."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import AdapterShape
from opentinker.services.trainer.bank.adapter_bank import AdapterBank, StepResult
from opentinker.services.trainer.bank.bank_commands import ForwardResult
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.mixed_batch import MixedBatch
from opentinker.services.trainer.bank.pass_part import PassOptions
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.errors import NotFound, OpenTinkerError
from tests.conftest import WAIT_S, until
from tests.unit.trainer.bank.conftest import LIMITS, MakeBank, add_tenant, some_units

LORA = LoraSpec(rank=4, alpha=8.0)


class Hold:
    """Makes a method of the bank wait in its thread."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, bank: AdapterBank, method: str, *, before: bool = False
    ) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        function = getattr(bank, method)

        def held(*arguments: Any, **options: Any) -> Any:
            if before:
                self.entered.set()
                self.go.wait(WAIT_S)
                return function(*arguments, **options)
            found = function(*arguments, **options)
            self.entered.set()
            self.go.wait(WAIT_S)
            return found

        monkeypatch.setattr(bank, method, held)


@pytest.mark.parametrize(("method", "rows"), [("run_pass", 24), ("load", 1)])
async def test_cancelled_pair_does_not_step(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch, method: str, rows: int
) -> None:
    """During a pass, with more of its rows to come, and during the load for the first pass."""
    bank = make_bank()
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        hold = Hold(monkeypatch, bank, method)
        pair = asyncio.gather(
            loop.run_units("x", "a", some_units(0, rows=rows, shared=False), PassOptions()),
            loop.optim_step("x", "a", AdamSettings(lr=1e-3)),
        )
        await until(hold.entered.is_set)
        pair.cancel()
        hold.go.set()
        await until(lambda: not len(loop._queue))
        await loop.run_units("x", "a", some_units(1), PassOptions(), backward=False)
        (adapter,) = bank.residency.bring(["a"])
        assert adapter.steps == 0 and not adapter.gradient.any() and adapter.partial is None


async def test_step_cancelled_during_its_load_is_not_carried_out(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        hold = Hold(monkeypatch, bank, "load")
        step = asyncio.create_task(loop.optim_step("x", "a", AdamSettings(lr=1e-3)))
        await until(hold.entered.is_set)
        step.cancel()
        hold.go.set()
        assert (await loop.optim_step("x", "a", AdamSettings(lr=1e-3))).steps == 1


async def test_cancelled_and_failed_removals_leave_the_adapter(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        hold = Hold(monkeypatch, bank, "run_pass")
        forward = asyncio.create_task(loop.run_units("x", "a", some_units(0), PassOptions()))
        await until(hold.entered.is_set)
        removal = asyncio.create_task(loop.remove("x", "a"))
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            await loop.optim_step("x", "a", AdamSettings(lr=1e-3))
        removal.cancel()
        hold.go.set()
        assert (await loop.optim_step("x", "a", AdamSettings(lr=1e-3))).steps == 1
        await forward

        def fail(name: str) -> None:
            raise OSError(errno.EIO, "bad disk", name)

        with monkeypatch.context() as context:
            context.setattr(bank, "remove", fail)
            with pytest.raises(OSError, match="bad disk"):
                await loop.remove("x", "a")
        assert (await loop.optim_step("x", "a", AdamSettings(lr=1e-3))).steps == 2
        await loop.remove("x", "a")
        assert "a" not in bank.residency


async def test_cancelled_creation_leaves_nothing(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        hold = Hold(monkeypatch, bank, "create", before=True)
        creation = asyncio.create_task(loop.create("x", "a", LORA, seed=0))
        await until(hold.entered.is_set)
        creation.cancel()
        hold.go.set()
        with pytest.raises(asyncio.CancelledError):
            await creation
        await loop.create("y", "a", LORA, seed=0)
        assert bank.residency.owners == {"a": "y"}


async def test_adapters_of_others_are_not_found(make_bank: MakeBank, tmp_path: Path) -> None:
    async with BankLoop(make_bank()) as loop:
        await loop.create("x", "a", LORA, seed=0)
        for command in (
            loop.run_units("y", "a", some_units(0), PassOptions()),
            loop.optim_step("y", "a", AdamSettings(lr=1e-3)),
            loop.export_peft("y", "a", tmp_path / "a"),
            loop.remove("y", "a"),
        ):
            with pytest.raises(NotFound, match="no adapter 'a'"):
                await command
        await loop.export_peft("x", "a", tmp_path / "a")
        await loop.import_peft("y", "b", tmp_path / "a")
        with pytest.raises(NotFound):
            await loop.remove("x", "b")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad disk"), NotFound("gone"), Refused("not of the model")])
async def test_errors_of_a_load_are_the_answer_of_their_command_alone(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bank = make_bank()
    for number in (0, 1):
        add_tenant(bank, number)
    place: object = bank.base if isinstance(error, Refused) else bank.residency
    name = "adapt_for" if isinstance(error, Refused) else "bring"
    function = getattr(place, name)
    (first,) = bank.residency.bring(["t0"])

    def fail(asked: Any) -> Any:
        asked = asked if isinstance(asked, AdapterShape) else list(asked)
        if asked in (first.shape, ["t0"]):
            raise error
        return function(asked)

    monkeypatch.setattr(place, name, fail)
    async with BankLoop(bank) as loop:
        for _ in range(2):
            spoiled, fine, no_step, step = await asyncio.gather(
                *(loop.run_units(f"tenant{n}", f"t{n}", some_units(n), PassOptions()) for n in (0, 1)),
                *(loop.optim_step(f"tenant{n}", f"t{n}", AdamSettings(lr=1e-3)) for n in (0, 1)),
                return_exceptions=True,
            )
            assert spoiled is error and no_step is error
            assert isinstance(fine, ForwardResult) and not isinstance(step, BaseException)


async def test_half_a_command_does_not_outlive_the_loop(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        hold = Hold(monkeypatch, bank, "run_pass")
        data = some_units(0, rows=24, shared=False)
        forward = asyncio.create_task(loop.run_units("x", "a", data, PassOptions()))
        await until(hold.entered.is_set)
        assert bank.residency._resident["a"].partial is not None
        asyncio.get_running_loop().call_soon(hold.go.set)
    with pytest.raises(asyncio.CancelledError):
        await forward
    assert bank.residency.bring(["a"])[0].partial is None


async def test_steps_do_not_hold_up_passes_and_waiting_ones_are_bounded(make_bank: MakeBank) -> None:
    bank = make_bank(limits=replace(LIMITS, waiting_commands=20))
    order: list[str] = []
    async with BankLoop(bank) as loop:
        for name in ("steps", "rows"):
            await loop.create(name, name, LORA, seed=0)

        async def step() -> None:
            await loop.optim_step("steps", "steps", AdamSettings(lr=1e-3))
            order.append("step")

        steps = [asyncio.create_task(step()) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="20 commands of yours are in the queue"):
            await loop.optim_step("steps", "steps", AdamSettings(lr=1e-3))
        await loop.run_units("rows", "rows", some_units(0, rows=1), PassOptions())
        assert len(order) <= 3
        await asyncio.gather(*steps)


async def test_commands_after_a_crash_of_the_loop_are_refused(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners remove their adapters when they end, and would wait for ever."""
    loop = BankLoop(make_bank())

    def crash(*_: Any) -> None:
        raise LookupError("in the queue")

    with pytest.raises(LookupError):
        async with loop:
            await loop.create("x", "a", LORA, seed=0)
            with monkeypatch.context() as context:
                context.setattr(loop._queue, "take", crash)
                with pytest.raises(asyncio.CancelledError):
                    await loop.run_units("x", "a", some_units(0), PassOptions())
            for command in (loop.remove("x", "a"), loop.create("x", "b", LORA, seed=0)):
                with pytest.raises(OpenTinkerError, match="has ended"):
                    await asyncio.wait_for(command, WAIT_S)


@pytest.mark.parametrize("rows", [1, 24])
async def test_a_pass_that_raises_ends_the_command_at_fault_alone(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Alone it is computed too, and the other command has the gradient that it would have had."""
    bank = make_bank()
    for number in (0, 1):
        add_tenant(bank, number)
    run, passes = MixedBatch.run, list[int]()

    def run_or_fail(batch: MixedBatch, base: Any) -> Any:
        passes.append(len(batch.pieces))
        found = run(batch, base)
        if passes[0] == 2 and any(piece.adapter.name == "t0" for piece in batch.pieces):
            raise MemoryError("not enough")
        return found

    monkeypatch.setattr(MixedBatch, "run", run_or_fail)
    data = some_units(1, rows=rows, shared=False)
    async with BankLoop(bank) as loop:
        spoiled, fine = await asyncio.gather(
            loop.run_units("tenant0", "t0", some_units(0, rows=24, shared=False), PassOptions()),
            loop.run_units("tenant1", "t1", data, PassOptions()),
            return_exceptions=True,
        )
        assert isinstance(spoiled, MemoryError) and isinstance(fine, ForwardResult) and passes[0] == 2
        found = {one.name: one.gradient.clone() for one in bank.residency.bring(["t0", "t1"])}
        assert not found["t0"].any()
        await loop.write("tenant1", "t1", {}, None)
        passes[:] = [1]
        await loop.run_units("tenant1", "t1", data, PassOptions())
        (again,) = bank.residency.bring(["t1"])
        assert torch.allclose(found["t1"], again.gradient, rtol=1e-4, atol=1e-6) and again.gradient.any()


async def test_a_call_or_step_that_raises_ends_its_command_alone(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()

    def fail(*_: Any) -> None:
        raise MemoryError("not enough")

    async with BankLoop(bank) as loop:
        await loop.create("x", "a", LORA, seed=0)
        for method, command in (
            ("read", loop.read("x", "a")),
            ("optim_step", loop.optim_step("x", "a", AdamSettings(lr=1e-3))),
        ):
            with monkeypatch.context() as context:
                context.setattr(bank, method, fail)
                with pytest.raises(MemoryError):
                    await command
        assert (await loop.optim_step("x", "a", AdamSettings(lr=1e-3))).steps == 1


async def test_a_step_that_no_float_holds_harms_its_tenant_alone(
    make_bank: MakeBank,
) -> None:
    """Both steps wait for the same round; the other adapter then is as after a step without the first."""
    stepped = []
    for lr in (1e300, None):
        bank = make_bank()
        for number in (0, 1):
            add_tenant(bank, number)
        async with BankLoop(bank) as loop:
            for number in (0, 1):
                await loop.run_units(f"tenant{number}", f"t{number}", some_units(number), PassOptions())
            steps = [loop.optim_step("tenant1", "t1", AdamSettings(lr=1e-3))]
            if lr is not None:
                steps.append(loop.optim_step("tenant0", "t0", AdamSettings(lr=lr)))
            fine, *refused = await asyncio.gather(*steps, return_exceptions=True)
            assert all(isinstance(one, Refused) and "lr = 1e+300" in str(one) for one in refused)
            assert not isinstance(fine, BaseException) and fine.steps == 1
        first, other = bank.residency.bring(["t0", "t1"])
        assert first.steps == 0 and first.gradient.any() and not other.gradient.any()
        stepped.append({name: vector.clone() for name, vector in other.vectors.items()})
    for name, vector in stepped[0].items():
        assert torch.allclose(vector, stepped[1][name], rtol=1e-4, atol=1e-6), name


async def test_a_deterministic_step_that_raises_ends_its_command_alone(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    for number in (0, 1):
        add_tenant(bank, number, deterministic=number == 0)

    def fail(*_: Any) -> None:
        raise MemoryError("not enough")

    monkeypatch.setattr("opentinker.services.trainer.bank.adamw.step_alone", fail)
    first, second = bank.optim_step([(f"t{number}", AdamSettings(lr=1e-3)) for number in (0, 1)])
    assert isinstance(first, MemoryError) and isinstance(second, StepResult) and second.steps == 1


async def test_waiting_for_other_tenants_is_told_apart_from_a_tenants_own_passes(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        for name in ("x", "y"):
            await loop.create(name, name, LORA, seed=0)
        hold = Hold(monkeypatch, bank, "run_pass")
        first = asyncio.create_task(loop.run_units("x", "x", some_units(0), PassOptions()))
        await until(hold.entered.is_set)
        second = asyncio.create_task(loop.run_units("y", "y", some_units(1), PassOptions()))
        await asyncio.sleep(0.3)  # what is measured
        hold.go.set()
        await asyncio.gather(first, second)
        assert loop.waited_s["y"] >= 0.25 and loop.waited_s["x"] < loop.waited_s["y"]


async def test_what_is_kept_of_tenants_is_bounded(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank()
    async with BankLoop(bank) as loop:
        for totals in (loop.passed, loop.waited_s):
            monkeypatch.setattr(totals, "_most", 2)
        for name in ("x", "y", "z", "y"):
            await loop.wait_for_room(name)
            if name not in bank.residency:
                await loop.create(name, name, LORA, seed=0)
            await loop.run_units(name, name, some_units(0, rows=1), PassOptions())
        tokens = some_units(0, rows=1)[0].tokens
        assert [loop.passed[name] for name in "xyz"] == [0, 2 * tokens, tokens] and len(loop.waited_s) == 2
        assert not len(loop._rooms)
