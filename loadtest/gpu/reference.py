"""Reference-forward's scorer on the device, against the same on the CPU, and its speed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loadtest.gpu._bench import Bench, Finding, at_most
from loadtest.gpu._models import HALF, TINY, Shape, batch, made
from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.shared.types.trajectories import Group

MEDIUM = Shape("medium", 512, 1024, 4, 8, 2, 64, 2048)


def logprobs(bench: Bench) -> Iterator[Finding]:
    shape, answer = (TINY, 12) if bench.small else (MEDIUM, 200)
    base, groups = made(bench, shape), batch(shape, 3, 4, answer, answer)
    temperatures = [1.0, 0.7, 1.0]
    expected = _scored(Scorer(), ModelKey(str(base), "float32"), groups, temperatures)
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.05)):
        found = _scored(Scorer(device=bench.device), ModelKey(str(base), dtype), groups, temperatures)
        apart = float(np.abs(found - expected).mean())
        yield at_most(f"reference logprobs in {dtype}, mean difference from the CPU", apart, limit, " nats")


def speed(bench: Bench) -> Iterator[Finding]:
    shape, answer = (TINY, 12) if bench.small else (HALF, 512)
    scorer, groups = Scorer(device=bench.device), batch(shape, 4, 8, answer, answer)
    model = scorer.load(ModelKey(str(made(bench, shape)), "bfloat16"))
    scorer.logprobs(model, groups[:1], [1.0])
    before, began = scorer.computed, bench.now()
    scorer.logprobs(model, groups, [1.0] * len(groups))
    rate = (scorer.computed - before) / (bench.now() - began)
    yield Finding(f"reference-forward of a {shape.name} model in bf16", f"{rate:,.0f} tokens/s")


def _scored(scorer: Scorer, key: ModelKey, groups: list[Group], temperatures: list[float]) -> np.ndarray:
    found = scorer.logprobs(scorer.load(key), groups, temperatures)
    return np.concatenate([part for group in found for part in group])
