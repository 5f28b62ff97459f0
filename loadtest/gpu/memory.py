"""Memory of training steps, against what `shared/data/gpu_memory.py` plans for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from loadtest.gpu._bench import Bench, Finding, Skipped, at_least, at_most
from loadtest.gpu._models import HALF, TINY, VERSION, Shape, batch, learner_of, made, spec_of
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.data.gpu_memory import ModelSize, training_bytes
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.trajectories import Group

LONG = 1024
TOKENS = 8 * LONG


def planned_of(shape: Shape, spec: JobSpec) -> int:
    """Return the planned bytes of a job's trainer."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    size = ModelSize(shape.hidden, shape.inner, shape.layers, queries, keys, shape.vocabulary, True)
    return training_bytes(spec, size).total


def all_weights(bench: Bench) -> Iterator[Finding]:
    yield from _compared(bench, "all weights, bf16")


def layers_recomputed(bench: Bench) -> Iterator[Finding]:
    yield from _compared(bench, "all weights, bf16, layers recomputed", train={"gradient_checkpointing": True})


def adapter(bench: Bench) -> Iterator[Finding]:
    yield from _compared(bench, "LoRA of rank 16, bf16", model={"lora": {"rank": 16}})


def _compared(bench: Bench, name: str, **parts: dict[str, Any]) -> Iterator[Finding]:
    """A step's peak is at most what was planned, and not far below it."""
    shape = TINY if bench.small else HALF
    base = made(bench, shape)
    length = 16 if bench.small else LONG
    parts["train"] = {"tokens_per_micro_batch": 8 * length} | parts.get("train", {})
    parts["model"] = {"dtype": "bfloat16"} | parts.get("model", {})
    plan = planned_of(shape, spec_of(bench, base, **parts))
    groups = batch(shape, 2, 4, 2, length)
    if not bench.on_gpu:
        learner = learner_of(bench, base, **parts)
        _step(learner, groups)
        raise Skipped(f"memory is measured on GPUs alone (planned here: {plan / 1e6:.1f} MB)")
    if plan > (free := bench.free_bytes()):
        raise Skipped(f"{plan / 1e9:.1f} GB are planned, and {free / 1e9:.1f} are free")
    before = torch.cuda.memory_allocated()
    learner = learner_of(bench, base, **parts)
    _step(learner, groups)
    torch.cuda.reset_peak_memory_stats()
    _step(learner, groups)
    peak = torch.cuda.max_memory_allocated() - before
    shown = f"{name}: {peak / 1e9:.2f} GB measured, over the {plan / 1e9:.2f} planned"
    yield at_most(shown, peak / plan, 1.0)
    yield at_least(shown, peak / plan, 0.5)


def _step(learner: RlLearner, groups: list[Group]) -> None:
    """Take a step while the version before it is being sent."""
    sent = learner.snapshot(VERSION)
    learner.step(groups, VERSION)
    del sent
