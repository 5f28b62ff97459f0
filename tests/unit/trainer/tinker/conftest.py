"""Data of the Tinker API for the small model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opentinker.shared.types.tinker import Datum

VOCABULARY = 64


def i32(values: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def f32(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def some_datum(seed: int, tokens: int = 9, width: int = 1, prompt: Sequence[int] = ()) -> Datum:
    """Random tokens after the prompt, with random targets, and everything that any loss needs."""
    rng = np.random.default_rng(seed)
    places = (len(prompt) + tokens) * width
    return Datum(
        tokens=i32([*prompt, *rng.integers(3, 60, tokens)]),
        targets=i32(rng.integers(3, 60, places)),
        width=width,
        weights=b"",
        logprobs=f32(rng.uniform(-4.6, -3.6, places)),
        advantages=f32(rng.normal(size=places)),
        mask=f32(rng.integers(0, 3, places) / 2),
    )
