"""Requests with a seed whose prompt is computed in several passes, on CPUs.

After each pass but the last, vLLM 0.32 takes back what the discarded sample has drawn, by the generator's offset. A
generator of a CPU has none: the engine ends with an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@cache
def repair() -> None:
    """Let samples that are discarded draw from another generator than their request's."""
    sample, keep_books = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync
    put_aside: dict[int, Any] = {}

    def _sample(self: Any, *arguments: Any, **options: Any) -> Any:
        batch = self.input_batch
        for row in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist():
            if row in batch.generators:
                put_aside[row] = batch.generators.pop(row)
        return sample(self, *arguments, **options)

    def _bookkeeping_sync(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return keep_books(self, *arguments, **options)
        finally:
            self.input_batch.generators.update(put_aside)
            put_aside.clear()

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = _sample, _bookkeeping_sync
