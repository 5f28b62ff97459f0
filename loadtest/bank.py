"""Measures an adapter bank: mixed batches of four clients, swaps of a slot, and the error of gradients.

    python -m loadtest.bank [--model DIR] [--rows 32] [--tokens 128] [--steps 5] [--repeats 3] [--swaps 40]

One client sends `--rows` rows a step, then four clients a quarter of them each, through one bank in this process; each
step is a pass of units and an optimizer step. The ratio is that of tokens per second of processor time, which other
work on the machine disturbs least. A swap brings an adapter of rank 16 from host memory into the only slot and the
other one out of it. The error is the largest relative difference between an adapter's gradient in a batch of five
adapters, which differ in rank, alpha, targets and loss, and alone.

Exit status 1 if four clients reach less than 0.95 of one, a swap takes more than 10 ms (median), or the error is above
1e-6.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from loadtest.support.machine import Others, own_s, verdict
from opentinker.shared.spec import LoraSpec

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.adapter_bank import AdapterBank
    from opentinker.services.trainer.bank.base_model import BaseModel
    from opentinker.services.trainer.bank.pass_part import Unit

CLIENTS = 4
RATIO, SWAP_MS, ERROR = 0.95, 10.0, 1e-6
LORA = LoraSpec(rank=16, alpha=32.0)
MIXTURE = [
    (LoraSpec(rank=4, alpha=8.0), "cross_entropy"),
    (LoraSpec(rank=16, alpha=4.0, target_modules=["q_proj", "down_proj"]), "ppo"),
    (LoraSpec(rank=2, alpha=16.0, target_modules=["v_proj", "o_proj"]), "cispo"),
    (LoraSpec(rank=8, alpha=16.0, init="gaussian"), "importance_sampling"),
    (LoraSpec(rank=3, alpha=6.0, target_modules=["gate_proj"]), "dro"),
]


def units_of(seed: int, rows: int, tokens: int, vocabulary: int, loss: str, scale: float = 1.0) -> list[Unit]:
    """Return random rows, a unit each."""
    import numpy as np

    from opentinker.services.trainer.tinker import losses

    random = np.random.default_rng(seed)
    data = [
        losses.Columns(
            ids_N=random.integers(3, vocabulary, tokens, dtype=np.int32),
            targets_M=random.integers(3, vocabulary, tokens, dtype=np.int32),
            width=1,
            factor_M=np.full(tokens, scale, np.float32),
            behaviour_M=random.uniform(-4.5, -3.8, tokens).astype(np.float32),
            advantages_M=random.normal(size=tokens).astype(np.float32),
        )
        for _ in range(rows)
    ]
    return losses.units_of(data, losses.find_loss(loss, {}), most=0)


async def speed(bank: AdapterBank, clients: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second, and per second of processor time."""
    from opentinker.services.trainer.bank.adamw import AdamSettings
    from opentinker.services.trainer.bank.bank_loop import BankLoop
    from opentinker.services.trainer.bank.pass_part import PassOptions

    rows = options.rows // clients
    async with BankLoop(bank) as loop:

        async def train(name: str, seed: int, steps: int) -> None:
            units = units_of(seed, rows, options.tokens, bank.base.vocabulary, "cross_entropy", 1 / rows)
            for _ in range(steps):
                await asyncio.gather(
                    loop.run_units(name, name, units, PassOptions()),
                    loop.optim_step(name, name, AdamSettings(lr=1e-4, clip=1.0)),
                )

        names = [f"client{n}" for n in range(clients)]
        await asyncio.gather(*(train(name, n, 1) for n, name in enumerate(names)))  # warms up
        began, spent = time.perf_counter(), own_s()
        await asyncio.gather(*(train(name, n, options.steps) for n, name in enumerate(names)))
        tokens = clients * rows * options.tokens * options.steps
        return tokens / (time.perf_counter() - began), tokens / (own_s() - spent)


def swap_ms(base: BaseModel, store: Path, swaps: int) -> float:
    """Return the median."""
    from opentinker.services.trainer.bank.adapter_bank import AdapterBank

    bank, took = AdapterBank(base, store, slots=1), list[float]()
    for name in ("a", "b"):
        bank.create(name, LORA, seed=0)
    for number in range(swaps):
        began = time.perf_counter()
        bank.residency.bring(["ab"[number % 2]])
        took.append(1e3 * (time.perf_counter() - began))
    return median(took)


def gradient_error(base: BaseModel, store: Path) -> float:
    """Return the largest of the mixture's adapters."""
    from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows
    from opentinker.services.trainer.bank.pass_part import PassOptions

    gradients = []
    for together in (True, False):
        bank = AdapterBank(base, store / str(together), slots=len(MIXTURE))
        rows = []
        for number, (lora, loss) in enumerate(MIXTURE):
            bank.create(str(number), lora, seed=number)
            (adapter,) = bank.residency.bring([str(number)])
            adapter.weights += 0.01 * adapter.weights.new_tensor(range(adapter.shape.size)).sin()  # B is not 0
            units = units_of(number, 3 + number, 24 + 16 * number, base.vocabulary, loss)
            rows.append(Rows(str(number), units, PassOptions()))
        for part in [rows] if together else [[one] for one in rows]:
            bank.run_pass(part)
        gradients.append([one.gradient.double() for one in bank.residency.bring(map(str, range(len(MIXTURE))))])
    return max(float((m - a).norm() / a.norm()) for m, a in zip(*gradients, strict=True))


def run(options: argparse.Namespace) -> bool:
    import torch

    from examples.models.make_tiny import make_tiny
    from opentinker.services.trainer.bank.adapter_bank import AdapterBank
    from opentinker.services.trainer.bank.base_model import BaseModel
    from opentinker.services.trainer.bank.limits import BankLimits

    torch.set_num_threads(1)
    wall: dict[int, list[float]] = {1: [], CLIENTS: []}
    processor: dict[int, list[float]] = {1: [], CLIENTS: []}
    others = Others()
    with tempfile.TemporaryDirectory() as directory:
        base = BaseModel(options.model or str(make_tiny(Path(directory, "tiny"))))
        total = options.rows * options.tokens
        limits = BankLimits(
            step_tokens=total, datum_tokens=options.tokens, command_tokens=total, waiting_tokens=4 * total
        )
        bank = AdapterBank(base, Path(directory, "store"), limits)
        for number in range(CLIENTS):
            bank.create(f"client{number}", LORA, seed=number, owner=f"client{number}")
        for _ in range(options.repeats):
            for clients in (1, CLIENTS):
                by_wall, by_processor = asyncio.run(speed(bank, clients, options))
                wall[clients].append(by_wall)
                processor[clients].append(by_processor)
        swap = swap_ms(base, Path(directory, "swaps"), options.swaps)
        error = gradient_error(base, Path(directory, "error"))
    foreign = others.stop()
    ratio = median(b / a for a, b in zip(processor[1], processor[CLIENTS], strict=True))
    print(f"capacity: {bank.capacity}")
    print(f"{'':24}{'tokens/s':>12}{'tokens/CPU s':>14}")
    for clients, name in ((1, "one client"), (CLIENTS, "four clients, mixed")):
        print(f"{name:24}{median(wall[clients]):12,.0f}{median(processor[clients]):14,.0f}")
    print(f"{'slot swap, median':24}{swap:9.2f} ms")
    print(f"{'largest gradient error':24}{error:12.2g}")
    good = [
        verdict(f"four clients reach >= {RATIO} of one ({ratio:.3f})", ratio >= RATIO, foreign),
        verdict(f"slot swap <= {SWAP_MS:g} ms", swap <= SWAP_MS, foreign),
        verdict(f"gradient error <= {ERROR:g}", error <= ERROR),
    ]
    return all(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory of a model; without it the tiny one of the examples")
    parser.add_argument("--rows", type=int, default=32, help="of a step, of all clients together")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--swaps", type=int, default=40)
    sys.exit(0 if run(parser.parse_args()) else 1)


if __name__ == "__main__":
    main()
