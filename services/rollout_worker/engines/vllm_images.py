"""A prompt that shows images, as vLLM's engine takes it once its own processing is over: ours is the processing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.inputs.engine import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from opentinker.services.rollout_worker.engines.base import Shown
from opentinker.shared.types.trajectories import Picture

PARTS = ("pixel_values", "pixel_attention_mask")
"""Inputs of Idefics3: [1, parts of the image, ...]."""


def engine_input(prompt_ids: list[int], shown: Sequence[Shown]) -> EngineInput:
    if not shown:
        return tokens_input(prompt_ids)
    parts = torch.tensor([one.inputs["pixel_values"].shape[1] for one in shown])
    inputs: dict[str, Any] = {name: torch.cat([one.inputs[name][0] for one in shown]) for name in PARTS}
    fields = {name: MultiModalFieldConfig.flat_from_sizes("image", parts) for name in PARTS}
    inputs["num_patches"] = parts
    fields["num_patches"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [one.picture.digest for one in shown]},
        {"image": [_place(one.picture) for one in shown]},
    )


def _place(picture: Picture) -> PlaceholderRange:
    start, end = picture.runs[0][0], picture.runs[-1][1]
    places = torch.zeros(end - start, dtype=torch.bool)
    for first, last in picture.runs:
        places[first - start : last - start] = True
    return PlaceholderRange(offset=start, length=end - start, is_embed=places)
