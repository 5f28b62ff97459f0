"""The base of a trainer process: loaded once, changed when nothing trains on it, and the end of a bank that crashes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.trainer import shared_base
from opentinker.services.trainer.shared_base import SharedBase, slots_of
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed
from tests.conftest import WAIT_S, until
from tests.support.factories import make_spec


def on(base: str, **resources: Any) -> JobSpec:
    return make_spec(
        model={"base": base, "lora": {}}, train={"steps": 1}, resources={"trainer": "shared", **resources}
    )  # fmt: skip


class Bank:
    """In the place of a bank's loop."""

    def __init__(self, base: str) -> None:
        self.base, self.bank, self.is_closed = base, SimpleNamespace(slots=1, capacity=None), False
        self.crash = asyncio.Event()

    async def __aenter__(self) -> Bank:
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        await self.crash.wait()
        raise MemoryError("in a pass")


class Process(SharedBase):
    """One whose loads a test holds up."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(settings=SimpleNamespace(bank_jobs=1), store=None))  # type: ignore[arg-type]
        self.loads: list[Bank] = []
        self.asked = 0
        self.may_load = threading.Event()
        self.may_load.set()

    def _load(self, spec: JobSpec) -> Any:
        self.may_load.wait()
        self.asked += 1
        if spec.model.base == "vision":
            raise JobFailed("model 'vision' is a vision model")
        self.loads.append(Bank(spec.model.base))
        return self.loads[-1]


@pytest.fixture
async def process(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    monkeypatch.setattr(shared_base, "opening", lambda *_: nullcontext())
    async with Process() as found:
        yield found
    assert all(bank.is_closed for bank in found.loads)


def test_slots_are_measured_on_a_gpu_whatever_the_setting_says() -> None:
    settings: Any = SimpleNamespace(bank_jobs=2, bank_measures=False)
    assert slots_of(settings, on("m")) == 2
    assert slots_of(settings, on("m", trainer_gpus=1)) is None
    server: dict[str, Any] = {"name": "t", "kind": "tinker", "model": {"base": "m"}}
    assert slots_of(settings, parse_spec(server | {"tinker": {"max_adapters": 5}})) == 5
    full = {"tinker": {"full_weights": True}, "resources": {"trainer_gpus": 1}}
    assert slots_of(settings, parse_spec(server | full)) == 1


def test_a_job_that_wants_a_gpu_fails_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings = SimpleNamespace(bank_jobs=2, bank_tokens=64, bank_measures=False, data_dir=tmp_path)
    base = SharedBase.__new__(SharedBase)
    base._ctx = SimpleNamespace(settings=settings, store=None, worker="shared")  # type: ignore[assignment]
    with pytest.raises(JobFailed, match="this trainer has no GPU"):
        base._load(on("m", trainer_gpus=1))


@pytest.mark.parametrize(("measures", "slots"), [(False, 2), (True, 64)])
async def test_slots_are_as_many_as_jobs_or_as_fit(small: Path, tmp_path: Path, *, measures: bool, slots: int) -> None:
    settings = SimpleNamespace(bank_jobs=2, bank_tokens=64, bank_measures=measures, data_dir=tmp_path)
    base = SharedBase(SimpleNamespace(settings=settings, store=None, worker="shared"))  # type: ignore[arg-type]
    bank = base._load(on(str(small))).bank
    assert bank.slots == slots and (bank.capacity is not None) == measures


async def test_jobs_of_one_base_have_one_bank_which_stays_for_the_next(process: Process) -> None:
    async with process.bank_for("j-1", on("a")) as first, process.bank_for("j-2", on("a")) as second:
        assert first is second
    async with process.bank_for("j-3", on("a")) as third:
        assert third is first and len(process.loads) == 1


async def test_a_job_of_another_base_waits_until_the_last_job_has_left(process: Process) -> None:
    entered = asyncio.Event()

    async def other() -> None:
        async with process.bank_for("j-2", on("b")):
            entered.set()

    async with process.bank_for("j-1", on("a")):
        waiting = asyncio.create_task(other())
        async with process.bank_for("j-3", on("a")):
            pass
        assert not entered.is_set() and not process.loads[0].is_closed
    await waiting
    assert [bank.base for bank in process.loads] == ["a", "b"] and process.loads[0].is_closed


async def test_a_job_that_is_cancelled_while_the_base_loads_leaves_it_to_the_next(process: Process) -> None:
    process.may_load.clear()

    async def first() -> None:
        async with process.bank_for("j-1", on("a")):
            raise AssertionError

    loading = asyncio.create_task(first())
    await asyncio.sleep(0)
    loading.cancel()
    process.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    async with process.bank_for("j-2", on("b")) as bank:
        assert id(bank) == id(process.loads[-1])


async def test_a_base_that_cannot_be_shared_fails_its_job_alone(process: Process) -> None:
    async with process.bank_for("j-1", on("a")):
        pass
    with pytest.raises(JobFailed, match="is a vision model"):
        async with process.bank_for("j-2", on("vision")):
            raise AssertionError
    async with process.bank_for("j-3", on("a")):
        assert [bank.base for bank in process.loads] == ["a", "a"]


async def test_a_bank_that_crashes_ends_the_process(process: Process) -> None:
    failing = asyncio.create_task(process.failure())
    async with process.bank_for("j-1", on("a")):
        process.loads[0].crash.set()
        await until(failing.done)
    with pytest.raises(MemoryError, match="in a pass"):
        await failing


async def test_a_cancelled_job_does_not_wait_for_the_load(process: Process) -> None:
    """The next job of that base has what it began."""
    process.may_load.clear()

    async def first() -> None:
        async with process.bank_for("j-1", on("a")):
            raise AssertionError

    loading = asyncio.create_task(first())
    await until(lambda: process._jobs)
    loading.cancel()
    await asyncio.wait([loading], timeout=WAIT_S)
    assert loading.cancelled() and not process.loads
    process.may_load.set()
    async with process.bank_for("j-2", on("a")) as bank:
        assert [id(bank)] == [id(one) for one in process.loads]


async def test_a_load_that_fails_fails_its_job_and_the_next_loads_again(process: Process) -> None:
    process.may_load.clear()

    async def join(job: str) -> None:
        async with process.bank_for(job, on("vision")):
            raise AssertionError

    joining = [asyncio.create_task(join(f"j-{n}")) for n in range(2)]
    await until(lambda: process._jobs == 2)
    process.may_load.set()
    found = await asyncio.gather(*joining, return_exceptions=True)
    assert [str(error) for error in found] == ["model 'vision' is a vision model"] * 2 and process.asked == 2


async def test_a_base_whose_files_have_changed_is_loaded_again(process: Process, tmp_path: Path) -> None:
    """A job that comes while others train on the earlier files fails."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    async with process.bank_for("j-1", on(str(model))):
        (model / "model.safetensors").write_bytes(b"22")
        with pytest.raises(JobFailed, match="have changed since the trainer loaded it"):
            async with process.bank_for("j-2", on(str(model))):
                raise AssertionError
    async with process.bank_for("j-3", on(str(model))), process.bank_for("j-4", on(str(model))):
        assert len(process.loads) == 2 and process.loads[0].is_closed


async def test_a_place_that_comes_after_its_group_has_ended_leaves_nothing_behind(process: Process) -> None:
    lease = Lease(job="j", worker="w", incarnation="i", epoch=1, pool=Pool.TRAINER)
    with process.leading(lease):
        other = asyncio.create_task(process.until_ended(lease))
        await asyncio.sleep(0)
    await asyncio.wait_for(other, WAIT_S)
    late = asyncio.create_task(process.until_ended(lease))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.wait([late])
    assert process._ended_leads == {}
