"""Frozen models in memory, and the logprobs they give to groups that somebody else sampled. No messages here."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from opentinker.shared.nn.forward import layout, token_logprobs
from opentinker.shared.nn.models import load_model, torch_dtype
from opentinker.shared.nn.packing import pack
from opentinker.shared.spec import ModelSpec
from opentinker.shared.types import Group, Trajectory

Key = tuple[str, str]
"""Path or hub id, dtype."""


class Scorer:
    """Keeps the models used last within `memory_bytes`; one larger than that is loaded alone."""

    def __init__(self, memory_bytes: int, *, device: str = "cpu", tokens_per_micro_batch: int = 8192) -> None:
        self.memory_bytes = memory_bytes
        self.device = device
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.loads = 0
        """Times a model was loaded, over the scorer's life."""
        self._models: OrderedDict[Key, Any] = OrderedDict()

    def score(self, model: ModelSpec, temperature: float, group: Group) -> Group:
        """The group with `ref_logprobs_T` filled in: log softmax(logits / temperature) of the sampled tokens, else 0.

        The reference of a LoRA job is the base without the adapter. Raises JobFailed if the model cannot be loaded.
        """
        frozen = self._model(model)
        rows = [t for t in group.trajectories if t.mask.any()]
        logprobs_of: dict[int, np.ndarray[Any, Any]] = {}
        for members in pack([len(t.mask_T) for t in rows], self.tokens_per_micro_batch):
            batch = [rows[i] for i in members]
            plan = layout([t.ids for t in batch], [t.mask for t in batch]).to(self.device)
            with torch.inference_mode():
                logprobs_M, _ = token_logprobs(frozen, plan, temperature=temperature)
            counts = [int(np.count_nonzero(t.mask)) for t in batch]
            parts = np.split(logprobs_M.float().cpu().numpy(), np.cumsum(counts)[:-1])
            logprobs_of |= {id(t): part for t, part in zip(batch, parts, strict=True)}
        return msgspec.structs.replace(
            group, trajectories=[_with_reference(t, logprobs_of.get(id(t))) for t in group.trajectories]
        )

    def _model(self, spec: ModelSpec) -> Any:
        key = (spec.base, spec.dtype)
        if key not in self._models:
            self._make_room(_bytes_on_disk(spec.base))
            self._models[key] = load_model(spec.base, torch_dtype(spec.dtype), self.device)
            self.loads += 1
            self._make_room(0, keep=key)
        self._models.move_to_end(key)
        return self._models[key]

    def _make_room(self, wanted: int, keep: Key | None = None) -> None:
        """Drop the models not used for longest until `wanted` more bytes fit."""
        while self._models and self.used_bytes + wanted > self.memory_bytes and next(iter(self._models)) != keep:
            self._models.popitem(last=False)

    @property
    def used_bytes(self) -> int:
        """Asked for by the heartbeat while another thread scores."""
        return sum(_bytes_of(model) for model in list(self._models.values()))


def _bytes_of(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _bytes_on_disk(base: str) -> int:
    return sum(path.stat().st_size for path in Path(base).expanduser().glob("*.safetensors"))


def _with_reference(trajectory: Trajectory, logprobs_M: np.ndarray[Any, Any] | None) -> Trajectory:
    logprobs_T = np.zeros(len(trajectory.mask_T), dtype="<f4")
    if logprobs_M is not None:
        logprobs_T[trajectory.mask.astype(bool)] = logprobs_M
    return msgspec.structs.replace(trajectory, ref_logprobs_T=logprobs_T.tobytes())
