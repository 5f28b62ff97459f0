"""Training speed: tokens a second, and the share of the device's arithmetic that a step uses (MFU).

Operations are counted as 6 per weight and token plus attention; layers that are computed twice count once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loadtest.gpu._bench import Bench, Finding, Skipped, at_least
from loadtest.gpu._models import FOUR, HALF, ONE_AND_A_HALF, TINY, VERSION, Shape, batch, learner_of, made, spec_of
from loadtest.gpu.memory import planned_of

NOMINAL_TFLOPS = {
    "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "A10": 125.0, "RTX 4090": 165.0, "RTX 3090": 71.0, "RTX A6000": 155.0,
}  # fmt: skip
"""bfloat16 with float32 sums, dense, as data sheets give it; the first name that the device's name contains."""
STEPS = 3


def half(bench: Bench) -> Iterator[Finding]:
    yield from _measured(bench, TINY if bench.small else HALF, groups=4)


def one_and_a_half(bench: Bench) -> Iterator[Finding]:
    yield from _measured(bench, TINY if bench.small else ONE_AND_A_HALF, groups=4)


def four(bench: Bench) -> Iterator[Finding]:
    yield from _measured(bench, TINY if bench.small else FOUR, groups=2, gradient_checkpointing=True)


def peak_of(bench: Bench) -> tuple[float, str]:
    """Return the operations per second of a large product of bfloat16 matrices, and what the data sheet says."""
    size = 256 if bench.small else 8192
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):
        a @ b
    began, times = bench.now(), 2 if bench.small else 10
    for _ in range(times):
        a @ b
    return 2.0 * size**3 * times / (bench.now() - began), "matrix product of this size measured here"


def nominal(bench: Bench) -> float | None:
    """Return operations per second by the data sheet; None for a device that is not in the table."""
    name = torch.cuda.get_device_name() if bench.on_gpu else ""
    return next((1e12 * value for known, value in NOMINAL_TFLOPS.items() if known in name), None)


def _measured(bench: Bench, shape: Shape, groups: int, *, gradient_checkpointing: bool = False) -> Iterator[Finding]:
    length = 12 if bench.small else 1024
    train = {
        "gradient_checkpointing": gradient_checkpointing,
        "tokens_per_micro_batch": 64 if bench.small else 16_384,
        "lr": 1e-6,
    }
    plan = planned_of(shape, spec_of(bench, bench.place, train=train))
    if bench.on_gpu and plan > (free := bench.free_bytes()):
        raise Skipped(f"all weights of a {shape.name} model need about {plan / 1e9:.0f} GB; {free / 1e9:.0f} are free")
    base = made(bench, shape)  # only now: it takes seconds, and gigabytes of disk
    learner = learner_of(bench, base, train=train, algorithm={"group_size": 8, "groups_per_batch": groups})
    # One token of prompt: nothing is shared, so every token of a trajectory is computed.
    batches = [batch(shape, groups, 8, 2, length, seed) for seed in range(STEPS + 1)]
    learner.step(batches[0], VERSION)
    began = bench.now()
    for one in batches[1:]:
        learner.step(one, VERSION)
    seconds = bench.now() - began
    lengths = [len(t.ids) for one in batches[1:] for group in one for t in group.trajectories]
    tokens, rate = sum(lengths) / seconds, shape.operations(lengths) / seconds
    recomputed = ", layers recomputed" if gradient_checkpointing else ""
    yield Finding(f"training a {shape.name} model, all weights, bf16{recomputed}", f"{tokens:,.0f} tokens/s")
    del learner
    bench.forget()
    measured, _ = peak_of(bench)
    sheet = nominal(bench)
    yield Finding(
        f"{shape.name}: share of a matrix product's speed ({measured / 1e12:.0f} TFLOP/s)", f"{rate / measured:.0%}"
    )
    if sheet is not None:
        yield at_least(f"{shape.name}: share of the data sheet's {sheet / 1e12:.0f} TFLOP/s (MFU)", rate / sheet, 0.1)
