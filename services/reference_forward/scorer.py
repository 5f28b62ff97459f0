"""Loads frozen models and scores groups with them. No messaging here.

Every call blocks: the service makes them in threads, one `score` at a time, concurrently with one `load` and any
`check`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.services.reference_forward.rewards import RewardModel
from opentinker.shared.nn.forward import token_scores, token_values
from opentinker.shared.nn.layers import float32_head
from opentinker.shared.nn.layout import Layout, layout, with_ends
from opentinker.shared.nn.lora import adapter_bytes, causal_lm, with_adapter
from opentinker.shared.nn.models import load_model, load_tokenizer, load_value_model, model_bytes, torch_dtype
from opentinker.shared.nn.packing import pack
from opentinker.shared.nn.vision import mark_image_tokens
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import F32
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group


class ValueModel(NamedTuple):
    """A frozen critic: a language model with a scalar head in place of the vocabulary."""

    model: Any
    """The whole model, with `config` and `parameters`."""
    decoder: Any
    head: Any

    def values(self, plan: Layout) -> Tensor:
        """Return float32 [M]. Raises JobFailed if a value is not finite."""
        values_M = token_values(self.decoder, self.head, plan)
        if not bool(torch.isfinite(values_M).all()):
            raise JobFailed("it got a value that is no finite number")
        return values_M


class Scorer:
    """`tokens_per_batch`: limit of one forward pass; a longer trajectory gets a separate pass.

    Raises RuntimeError if the device does not exist.
    """

    def __init__(self, *, device: str = "cpu", tokens_per_batch: int = 8192) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("reference_device is cuda, but there is no GPU here: set it to cpu")
        self.device = device
        self.tokens_per_batch = tokens_per_batch
        self._compatible: set[tuple[str, str, str]] = set()
        self.computed = 0
        """Tokens computed by models so far; shared prefixes count once."""

    def check(self, spec: JobSpec) -> None:
        """Raise JobFailed if the job's models do not share a tokenizer."""
        for own in (spec_of(spec, name) for name in spec.policies or ("",)):
            for role, part in (("teacher", own.teacher), ("value model", own.value_model)):
                if part is not None and (pair := (own.model.base, part.base, role)) not in self._compatible:
                    check_same_tokens(*pair)
                    self._compatible.add(pair)

    def size(self, key: ModelKey) -> int:
        """Return the bytes of the weights without loading them. Raises JobFailed if there is no such model."""
        weights = model_bytes(key.base, torch_dtype(key.dtype), head=key.head)
        return weights + (adapter_bytes(Path(key.adapter)) if key.adapter else 0)

    def load(self, key: ModelKey) -> Any:
        """Load a model. Raises JobFailed if it is unusable."""
        if key.head == "sequence":
            return RewardModel.load(key.base, torch_dtype(key.dtype), self.device, key.label)
        if key.head == "token":
            return ValueModel(*load_value_model(key.base, torch_dtype(key.dtype), self.device))
        model = load_model(key.base, torch_dtype(key.dtype), self.device)
        causal = causal_lm(with_adapter(model, Path(key.adapter))) if key.adapter else model
        if key.fp32_head:
            float32_head(causal)
        return causal

    def release_memory(self) -> None:
        """Free the memory of evicted models."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def score(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[Any]]:
        """Return `logprobs`, `values` or `RewardModel.score` by type of model, per group and trajectory. Raises
        JobFailed."""
        if isinstance(model, RewardModel):
            return model.score(groups, self.tokens_per_batch)
        if isinstance(model, ValueModel):
            return self.values(model, groups)
        return self.logprobs(model, groups, temperatures)

    def logprobs(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[F32]]:
        """Return per group and trajectory [T] log softmax(logits / temperature) of the sampled tokens, 0 elsewhere.

        Groups of several jobs share forward passes and equal prefixes in them; `temperatures` has one per group.
        Raises JobFailed for tokens outside the model's vocabulary.
        """
        heat_S = [heat for group, heat in zip(groups, temperatures, strict=True) for _ in group.trajectories]

        def compute(plan: Layout) -> Tensor:
            assert plan.temperatures_P is not None
            return token_scores(model, plan, temperature=plan.temperatures_P)[0]

        return self._per_token(model, groups, compute, heat_S)

    def values(self, model: ValueModel, groups: Sequence[Group]) -> list[list[F32]]:
        """Return per group and trajectory [T] the value before each sampled token, 0 elsewhere; for a truncated
        trajectory [T + 1], the last being the value of its end state."""
        return self._per_token(model.model, groups, model.values, None, ends=True)

    def _per_token(
        self,
        model: Any,
        groups: Sequence[Group],
        compute: Callable[[Layout], Tensor],
        heat_S: list[float] | None,
        *,
        ends: bool = False,
    ) -> list[list[F32]]:
        """Run `compute` on packed batches and unpack its results. It returns a number for every sampled token; with
        `ends` for the ends of truncated trajectories too."""
        for group in groups:
            _check_vocabulary(model, group)
        rows = [t for group in groups for t in group.trajectories]
        images = {digest: data for group in groups for digest, data in group.images.items()}
        _, masks_S = with_ends([t.ids for t in rows], [t.mask for t in rows], [ends and t.truncated for t in rows])
        found_S = [np.zeros(len(mask), dtype=np.float32) for mask in masks_S]
        sampled = [s for s, t in enumerate(rows) if t.mask.any()]
        for members in pack([len(rows[s].mask_T) for s in sampled], self.tokens_per_batch):
            batch = [sampled[m] for m in members]
            heat = None if heat_S is None else [heat_S[s] for s in batch]
            ids, shown = mark_image_tokens([rows[s] for s in batch], images)
            ids, masks = with_ends(ids, [rows[s].mask for s in batch], [ends and rows[s].truncated for s in batch])
            plan = layout(ids, masks, temperatures=heat, shown=shown)
            self.computed += len(plan.ids_N)
            with torch.inference_mode():
                found_M = compute(plan.to(self.device)).float().cpu().numpy()
            counts = [int(np.count_nonzero(masks_S[s])) for s in batch]
            for s, part_M in zip(batch, np.split(found_M, np.cumsum(counts)[:-1]), strict=True):
                found_S[s][masks_S[s]] = part_M
        each = iter(found_S)
        return [[next(each) for _ in group.trajectories] for group in groups]


def check_same_tokens(policy: str, other: str, role: str) -> None:
    """Raise JobFailed, with the first difference, unless every token of the policy has the same id in the other model,
    which may have additional ones: it receives the ids that the policy sampled. `role`: its name in errors."""
    ours, theirs = ({id: token for token, id in load_tokenizer(base).get_vocab().items()} for base in (policy, other))
    for number in sorted(ours):
        if ours[number] != theirs.get(number):
            said = f"{theirs[number]!r}" if number in theirs else "no token"
            raise JobFailed(
                f"{role} {other!r} does not share the tokenizer of model {policy!r}: id {number} is "
                f"{ours[number]!r} for the model and {said} for the {role}. Take a {role} of the same family"
            )


def _check_vocabulary(model: Any, group: Group) -> None:
    """Raise JobFailed for unknown tokens: on a GPU one would break the whole process."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    largest = max((int(t.ids.max()) for t in group.trajectories if len(t.ids)), default=0)
    if largest >= vocabulary:
        raise JobFailed(f"group {group.seq} holds token id {largest}, and this model knows {vocabulary} tokens")
