"""Frozen models, and what they say of groups that somebody else sampled. No messages here.

Every call blocks: the service makes them in threads, one `score` at a time, beside it one `load` and any `check`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opentinker.services.reference_forward.needs import ModelKey
from opentinker.services.reference_forward.rewards import RewardModel
from opentinker.services.reference_forward.vocabulary import check_same_tokens
from opentinker.shared.errors import JobFailed
from opentinker.shared.nn.forward import layout, token_logprobs
from opentinker.shared.nn.layers import float32_head
from opentinker.shared.nn.lora import adapter_bytes, causal_lm, with_adapter
from opentinker.shared.nn.models import load_model, model_bytes, torch_dtype
from opentinker.shared.nn.packing import pack
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import F32, Group, Trajectory


class Scorer:
    """`tokens_per_batch`: of one forward pass; a longer trajectory gets one of its own.

    Raises RuntimeError if the device is not there.
    """

    def __init__(self, *, device: str = "cpu", tokens_per_batch: int = 8192) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("reference_device is cuda, but there is no GPU here: set it to cpu")
        self.device = device
        self.tokens_per_batch = tokens_per_batch
        self._suited: set[tuple[str, str]] = set()
        self.computed = 0
        """Tokens that went through a model so far, shared prefixes once."""

    def check(self, spec: JobSpec) -> None:
        """What must hold between a job's models. Raises JobFailed."""
        if spec.teacher is None:
            return
        pair = (spec.model.base, spec.teacher.base)
        if pair not in self._suited:
            check_same_tokens(*pair)
            self._suited.add(pair)

    def size(self, key: ModelKey) -> int:
        """Bytes of the weights, told before they are loaded. Raises JobFailed if there is no such model."""
        weights = model_bytes(key.base, torch_dtype(key.dtype), classifier=key.judges)
        return weights + (adapter_bytes(Path(key.adapter)) if key.adapter else 0)

    def load(self, key: ModelKey) -> Any:
        """Raises JobFailed if the model is unusable."""
        if key.judges:
            return RewardModel.load(key.base, torch_dtype(key.dtype), self.device, key.label)
        model = load_model(key.base, torch_dtype(key.dtype), self.device)
        causal = causal_lm(with_adapter(model, Path(key.adapter))) if key.adapter else model
        if key.fp32_head:
            float32_head(causal)
        return causal

    def collect(self) -> None:
        """Give back the memory of models that were let go."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def score(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[Any]]:
        """Per group and trajectory what the model says, see `logprobs` and `RewardModel.score`. Raises JobFailed."""
        if isinstance(model, RewardModel):
            return model.score(groups, self.tokens_per_batch)
        return self.logprobs(model, groups, temperatures)

    def logprobs(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[F32]]:
        """Per group and trajectory, [T] log softmax(logits / temperature) of the sampled tokens, 0 elsewhere.

        Groups of several jobs share forward passes, and equal beginnings in them; `temperatures` has one per group.
        Raises JobFailed for tokens that the model does not know.
        """
        for group in groups:
            _check_vocabulary(model, group)
        rows = [(t, heat) for group, heat in zip(groups, temperatures, strict=True) for t in group.trajectories]
        logprobs_S = [np.zeros(len(t.mask_T), dtype=np.float32) for t, _ in rows]
        sampled = [s for s, (t, _) in enumerate(rows) if t.mask.any()]
        for members in pack([len(rows[s][0].mask_T) for s in sampled], self.tokens_per_batch):
            batch = [sampled[m] for m in members]
            found = self._logprobs(model, [rows[s][0] for s in batch], [rows[s][1] for s in batch])
            for s, logprobs_M in zip(batch, found, strict=True):
                logprobs_S[s][rows[s][0].mask.astype(bool)] = logprobs_M
        each = iter(logprobs_S)
        return [[next(each) for _ in group.trajectories] for group in groups]

    def _logprobs(self, model: Any, batch: list[Trajectory], temperatures: list[float]) -> list[F32]:
        plan = layout([t.ids for t in batch], [t.mask for t in batch], temperatures=temperatures).to(self.device)
        self.computed += len(plan.ids_N)
        assert plan.temperatures_U is not None
        with torch.inference_mode():
            logprobs_M, _ = token_logprobs(model, plan, temperature=plan.temperatures_U)
        counts = [int(np.count_nonzero(t.mask)) for t in batch]
        return np.split(logprobs_M.float().cpu().numpy(), np.cumsum(counts)[:-1])


def _check_vocabulary(model: Any, group: Group) -> None:
    """On a GPU an unknown token would break the whole process."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    largest = max((int(t.ids.max()) for t in group.trajectories if len(t.ids)), default=0)
    if largest >= vocabulary:
        raise JobFailed(f"group {group.seq} holds token id {largest}, and this model knows {vocabulary} tokens")
