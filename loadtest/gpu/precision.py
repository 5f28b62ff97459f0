"""Numbers of a training step: bfloat16 against float32, recomputed layers, float32 masters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loadtest.gpu._bench import Bench, Finding, at_least, at_most, gap, holds
from loadtest.gpu._models import TINY, VERSION, Shape, batch, learner_of, made
from opentinker.services.trainer.learners.rl import RlLearner

MEDIUM = Shape("medium-deep", 512, 1536, 8, 8, 2, 64, 4096)


def _prepared(bench: Bench) -> tuple[Shape, int]:
    """Return the shape and the tokens of an answer."""
    return (TINY, 12) if bench.small else (MEDIUM, 256)


def half_precision(bench: Bench) -> Iterator[Finding]:
    """A step in bfloat16 has about the loss and the gradient of the same step in float32."""
    shape, answer = _prepared(bench)
    base, groups = made(bench, shape), batch(shape, 2, 4, answer, answer)
    found = {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = learner_of(bench, base, model={"dtype": dtype}).step(groups, VERSION)
        bench.forget()
    whole, half = found["float32"], found["bfloat16"]
    norm = abs(half["grad_norm"] - whole["grad_norm"]) / whole["grad_norm"]
    yield at_most("bf16 and float32, gradient norm: relative difference", norm, 0.1)
    loss = abs(half["loss/policy"] - whole["loss/policy"])
    yield at_most("bf16 and float32, loss: difference", loss, 0.02)


def recomputed_layers(bench: Bench) -> Iterator[Finding]:
    """Gradient checkpointing changes memory, not gradients."""
    shape, answer = _prepared(bench)
    base, groups = made(bench, shape), batch(shape, 2, 4, answer, answer)
    norms, peaks = [], []
    for recompute in (False, True):
        bench.forget()
        learner = learner_of(bench, base, model={"dtype": "float32"}, train={"gradient_checkpointing": recompute})
        before = torch.cuda.memory_allocated() if bench.on_gpu else 0
        norms.append(learner.step(groups, VERSION)["grad_norm"])
        peaks.append(torch.cuda.max_memory_allocated() - before if bench.on_gpu else 0)
        del learner
    yield at_most("recomputed layers, gradient norm: relative difference", abs(norms[1] / norms[0] - 1), 1e-3)
    if bench.on_gpu:
        yield at_least("memory of a step without recomputed layers, over that with them", peaks[0] / peaks[1], 1.0)


def masters(bench: Bench) -> Iterator[Finding]:
    """A bfloat16 job trains float32 weights: updates far below bfloat16's resolution add up."""
    shape, answer = _prepared(bench)
    learner = learner_of(bench, made(bench, shape), train={"lr": 1e-6, "weight_decay": 0.0})
    name, weight = max(learner.parameters.items(), key=lambda item: item[1].numel())
    before, sent = weight.detach().clone(), _sent(learner, name)
    for step in range(3):
        learner.step(batch(shape, 2, 4, answer, answer, step), VERSION)
    kinds = {str(p.dtype) for p in learner.parameters.values()}
    kinds |= {str(t.dtype) for s in learner.optimizer.state.values() for key, t in s.items() if key != "step"}
    yield holds("trained weights and moments", kinds == {"torch.float32"}, ", ".join(sorted(kinds)))
    moved = float((weight.detach() - before).abs().max())
    yield at_least("movement of a float32 weight in three steps of lr 1e-6", moved, 1e-6)
    yield at_most("movement of what is published, in bf16", gap(_sent(learner, name), sent), 0.01)


def _sent(learner: RlLearner, name: str) -> torch.Tensor:
    """Return the tensor as rollout workers get it. Raises AssertionError if it is not bfloat16."""
    sent = dict(learner.named_weights())[name].clone()
    assert sent.dtype == torch.bfloat16, f"{name} is published as {sent.dtype}"
    return sent
