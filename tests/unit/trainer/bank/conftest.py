"""A bank on the small model, and data of its tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import BankLimits
from opentinker.services.trainer.bank.pass_part import PassOptions, Unit
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.services.trainer.tinker.losses import Columns, find_loss, units_of
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.manifest import ADAPTER, OPTIMIZER

LIMITS = BankLimits(step_tokens=128, datum_tokens=32, command_tokens=512, waiting_tokens=1024, rank=16)
MakeBank = Callable[..., AdapterBank]
Serve = Callable[[AdapterBank], BankLoop]


@dataclass(frozen=True)
class Task:
    """A loss, a factor of all of it, and a temperature."""

    name: str = "cross_entropy"
    options: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    temperature: float = 1.0

    def units(self, data: Sequence[Columns]) -> list[Unit]:
        """Return a unit for each datum."""
        scaled = [replace(datum, factor_M=datum.factor_M * np.float32(self.scale)) for datum in data]
        return units_of(scaled, find_loss(self.name, self.options), most=0)

    @property
    def pass_options(self) -> PassOptions:
        return PassOptions(temperature=self.temperature)


TENANTS: list[tuple[LoraSpec, Task, float]] = [
    (LoraSpec(rank=4, alpha=8.0), Task(), 1e-2),
    (LoraSpec(rank=8, alpha=4.0, target_modules=["q_proj", "down_proj"]), Task("ppo", scale=0.5), 3e-3),
    (LoraSpec(rank=2, alpha=16.0, target_modules=["v_proj", "o_proj"]), Task("cispo", temperature=0.7), 1e-3),
    (LoraSpec(rank=16, alpha=16.0, init="gaussian"), Task("importance_sampling", scale=0.01), 1e-4),
    (LoraSpec(rank=3, alpha=6.0, target_modules=["gate_proj"]), Task("dro", {"beta": 0.1}), 2e-2),
]
"""Adapter, task and learning rate of tenants that have nothing in common."""


@pytest.fixture(scope="session")
def base(small: Path) -> BaseModel:
    return BaseModel(str(small))


@pytest.fixture
def make_bank(base: BaseModel, tmp_path: Path) -> MakeBank:
    """Return a function that makes banks with separate stores on one base."""
    made: list[AdapterBank] = []

    def make(**options: Any) -> AdapterBank:
        options = {"slots": 8, "limits": LIMITS, **options}
        store = options.pop("store", tmp_path / f"store-{len(made)}")
        made.append(AdapterBank(base, store, **options))
        return made[-1]

    return make


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that runs the loop of a bank in another thread, where the service has its event loop."""
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread]] = []

    def start(bank: AdapterBank) -> BankLoop:
        begun, found = threading.Event(), []

        async def run() -> None:
            end = asyncio.Event()
            async with BankLoop(bank) as loop:
                found.append((loop, end))
                begun.set()
                await end.wait()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        assert begun.wait(30)
        loop, end = found[0]
        ends.append((loop.events, end, thread))
        return loop

    yield start
    for events, end, thread in ends:
        events.call_soon_threadsafe(end.set)
        thread.join()


def tensors(learner: PolicyModel, place: Path) -> dict[str, Tensor]:
    learner.save(place)
    state: dict[str, Tensor] = load_file(place / OPTIMIZER) | load_file(place / ADAPTER)
    return {name: tensor for name, tensor in state.items() if not name.startswith("rng/")}


def some_data(seed: int, rows: int = 4, shared: bool = True) -> list[Columns]:
    """Random rows, learned after a prompt of six tokens; with `shared`, it is the same in all tenants."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(rows):
        answer = rng.integers(3, 60, rng.integers(2, 12))
        prompt = np.arange(5, 11) if shared else rng.integers(3, 60, 6)
        ids_T = np.concatenate([prompt, answer]).astype(np.int32)
        learned, prompted = len(answer), np.zeros(len(prompt) - 1)
        made.append(Columns(
            ids_N=ids_T[:-1],
            targets_M=ids_T[1:],
            width=1,
            factor_M=np.append(prompted, rng.uniform(0.5, 1.5, learned)).astype(np.float32),
            behaviour_M=np.append(prompted, rng.uniform(-4.5, -3.8, learned)).astype(np.float32),
            advantages_M=np.append(prompted, rng.normal(size=learned)).astype(np.float32),
        ))  # fmt: skip
    return made


def some_units(seed: int, rows: int = 4, shared: bool = True, task: Task | None = None) -> list[Unit]:
    return (task or Task()).units(some_data(seed, rows, shared))


def rows_of(number: int, step: int = 0, **options: Any) -> Rows:
    task = TENANTS[number % len(TENANTS)][1]
    return Rows(f"t{number}", some_units(100 * number + step, task=task), task.pass_options, **options)


def add_tenant(bank: AdapterBank, number: int, *, deterministic: bool = False) -> None:
    """Create adapter `tNUMBER` of `tenantNUMBER`, with B that is not 0, so that A has a gradient."""
    lora = TENANTS[number % len(TENANTS)][0]
    bank.create(f"t{number}", lora, seed=number, owner=f"tenant{number}", deterministic=deterministic)
    (adapter,) = bank.residency.bring([f"t{number}"])
    noise = np.random.default_rng(number).normal(0, 0.05, adapter.shape.size)
    adapter.weights += adapter.weights.new_tensor(noise)
