"""Prepares prompts with images for vLLM's engine: processed here, so that vLLM's own preprocessing is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.inputs.engine import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from opentinker.services.rollout_worker.engines.base import Shown
from opentinker.shared.types.trajectories import Picture

Fields = dict[str, MultiModalFieldConfig]


def engine_input(prompt_ids: list[int], shown: Sequence[Shown]) -> EngineInput:
    if not shown:
        return tokens_input(prompt_ids)
    inputs, fields = _joined([one.inputs for one in shown])
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [one.picture.digest for one in shown]},
        {"image": [_place(one.picture) for one in shown]},
    )


def _joined(images: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Fields]:
    """Join the inputs of images of one model, and say which rows are whose. The names tell families apart."""
    whole = MultiModalFieldConfig.batched("image")
    on_cpu = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    if "image_grid_thw" in images[0]:  # Qwen-VL: pixel_values [patches of the image, pixels], image_grid_thw [1, 3]
        inputs = {name: torch.cat([one[name] for one in images]) for name in ("pixel_values", "image_grid_thw")}
        of_image = MultiModalFieldConfig.flat_from_sizes("image", inputs["image_grid_thw"].prod(-1))
        return inputs, {"pixel_values": of_image, "image_grid_thw": on_cpu}
    if "pixel_attention_mask" in images[0]:  # Idefics3: [1, parts of the image, ...]
        names = ("pixel_values", "pixel_attention_mask")
        parts = torch.tensor([one["pixel_values"].shape[1] for one in images])
        inputs = {name: torch.cat([one[name][0] for one in images]) for name in names}
        fields = {name: MultiModalFieldConfig.flat_from_sizes("image", parts) for name in names}
        return {**inputs, "num_patches": parts}, {**fields, "num_patches": on_cpu}
    return {"pixel_values": torch.cat([one["pixel_values"] for one in images])}, {"pixel_values": whole}  # LLaVA


def _place(picture: Picture) -> PlaceholderRange:
    start, end = picture.runs[0][0], picture.runs[-1][1]
    places = torch.zeros(end - start, dtype=torch.bool)
    for first, last in picture.runs:
        places[first - start : last - start] = True
    return PlaceholderRange(offset=start, length=end - start, is_embed=places)
