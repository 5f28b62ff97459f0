"""A shared trainer's adapter bank on the device: two adapters in one batch, against each alone and on the CPU; and the
steps of two jobs, against those of trainers of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from loadtest.gpu._bench import Bench, Finding, at_most, holds
from loadtest.gpu._models import FIRST_ID, TINY, VERSION, Shape, batch, learner_of, made, spec_of
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.job_adapter import JobAdapter
from opentinker.services.trainer.bank.mixed_batch import MixedBatch, Piece
from opentinker.services.trainer.bank.pass_part import PassOptions, PassPart, Scores, Unit
from opentinker.services.trainer.bank.shared_learners import SharedRlLearner
from opentinker.shared.nn.layout import layout
from opentinker.shared.spec import LoraSpec

MEDIUM = Shape("medium-wide", 512, 1536, 8, 8, 2, 64, 4096)
LORAS = (LoraSpec(rank=8, alpha=16.0), LoraSpec(rank=32, alpha=8.0, target_modules=["q_proj", "down_proj"]))
"""Of the two adapters, which have nothing in common."""
ROWS = 6
"""Of each adapter in the batch."""


def mixed(bench: Bench) -> Iterator[Finding]:
    """Gradients of two adapters in one batch are those of each alone, and those of the CPU."""
    shape, tokens = (TINY, 12) if bench.small else (MEDIUM, 200)
    directory = str(made(bench, shape))
    expected = _alone(BaseModel(directory, "float32", "cpu"), shape, tokens)
    for dtype, of_cpu, of_alone in (("float32", 1e-3, 1e-4), ("bfloat16", 0.1, 0.05)):
        base = BaseModel(directory, dtype, bench.device)
        adapters = _adapters(base)
        MixedBatch(_pieces(shape, tokens, adapters)).run(base)
        together = [adapter.gradient for adapter in adapters]
        devices = {str(vector.device.type) for adapter in adapters for vector in adapter.vectors.values()}
        yield holds(
            f"{dtype} base: adapters, gradients and moments are on", devices == {bench.device}, _listed(devices)
        )
        alone = _alone(base, shape, tokens)
        for number, (found, own, cpu) in enumerate(zip(together, alone, expected, strict=True), 1):
            about = f"adapter {number} of 2 in a batch, {dtype} base, gradient"
            yield at_most(f"{about}: difference from the adapter alone", _apart(found, own), of_alone)
            yield at_most(f"{about}: difference from float32 on the CPU", _apart(found, cpu), of_cpu)
        del base, adapters, together, alone, own, found
        bench.forget()


def jobs(bench: Bench) -> Iterator[Finding]:
    """Two jobs that share a trainer step as each does with one to itself, and their versions are on the device."""
    shape, answer = (TINY, 12) if bench.small else (MEDIUM, 200)
    directory = made(bench, shape)
    groups = [batch(shape, 2, 4, answer, answer, seed) for seed in range(2)]
    parts = [{"model": {"dtype": "float32", "lora": {"rank": lora.rank}}} for lora in LORAS]
    own = []
    for part, its in zip(parts, groups, strict=True):
        own.append(learner_of(bench, directory, **part).step(its, VERSION))
        bench.forget()
    with _serving(
        AdapterBank(BaseModel(str(directory), "float32", bench.device), bench.place / "bank", slots=2)
    ) as loop:
        learners = [
            SharedRlLearner(
                spec_of(bench, directory, **part, resources={"trainer": "shared"}), JobAdapter(loop, f"j{n}")
            )
            for n, part in enumerate(parts)
        ]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda learner: learner.load(None), learners))
            steps = list(threads.map(lambda learner, its: learner.step(its, VERSION), learners, groups))
        where = {bucket.device.type for learner in learners for bucket in learner.snapshot(VERSION).buckets}
    for number, (found, expected) in enumerate(zip(steps, own, strict=True), 1):
        apart = abs(found["grad_norm"] / expected["grad_norm"] - 1)
        yield at_most(f"job {number} of 2 in a trainer, gradient norm: difference from a trainer alone", apart, 1e-3)
    yield holds("versions that jobs of a shared trainer send are on", where == {bench.device}, _listed(where))


def _adapters(base: BaseModel) -> list[Adapter]:
    """Return fresh adapters, with B that is not 0, so that A has a gradient."""
    found = [base.fresh_adapter(f"a{n}", lora, seed=n) for n, lora in enumerate(LORAS)]
    for n, adapter in enumerate(found):
        noise = np.random.default_rng(n).normal(0, 0.02, adapter.shape.size)
        adapter.weights += torch.tensor(noise, dtype=torch.float32).to(adapter.weights.device)
    return found


def _pieces(shape: Shape, tokens: int, adapters: list[Adapter]) -> list[Piece]:
    """Return rows of each adapter; the second one's loss is scaled."""
    found = []
    for n, adapter in enumerate(adapters):
        dice, units = np.random.default_rng(10 + n), []
        for row in range(ROWS):
            ids_T = dice.integers(FIRST_ID, shape.vocabulary, tokens + row)
            plan = layout([ids_T], [np.arange(len(ids_T)) >= tokens // 2])
            units.append(Unit(plan, len(ids_T), partial(_loss, 0.1**n)))
        found.append(Piece(adapter, PassPart(units, PassOptions()), adapter.gradient))
    return found


def _loss(scale: float, scores: Scores) -> torch.Tensor:
    return -scores.logprobs_M.sum() * scale


def _alone(base: BaseModel, shape: Shape, tokens: int) -> list[torch.Tensor]:
    """Return the gradient of each adapter from a batch without the other."""
    adapters = _adapters(base)
    for piece in _pieces(shape, tokens, adapters):
        MixedBatch([piece]).run(base)
    return [adapter.gradient for adapter in adapters]


def _listed(devices: set[str]) -> str:
    return ", ".join(sorted(devices))


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of what is expected."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


@contextmanager
def _serving(bank: AdapterBank) -> Iterator[BankLoop]:
    """Run the bank's loop in a thread, as a trainer has it apart from those of its jobs."""
    begun, held = threading.Event(), list[tuple[BankLoop, asyncio.Event]]()

    async def serve() -> None:
        end = asyncio.Event()
        async with BankLoop(bank) as loop:
            held.append((loop, end))
            begun.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    begun.wait()
    loop, end = held[0]
    try:
        yield loop
    finally:
        loop.events.call_soon_threadsafe(end.set)
        thread.join()
