"""Helpers for tests of vision models: pictures, conversations with them, and their rendering by transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import torch

from examples.models.make_seeing import make_seeing
from opentinker.envs.png import png
from opentinker.services.rollout_worker import transcripts
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.shared.types.core import F32, Image, Message, Text
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, trajectory_of

KINDS: dict[str, dict[str, Any]] = {
    "idefics3": {},
    "parts": {"parts": True},
    **{family: {"family": family} for family in ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
}
"""Of models, by name: options of `make_seeing`."""


def make(directory: Path, kind: str) -> Path:
    return make_seeing(directory / kind, **KINDS[kind])


def picture(seed: int, width: int = 40, height: int = 28) -> Image:
    return Image(png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def ask(*parts: str | Image) -> list[Message]:
    return [Message(role="user", content=[Text(part) if isinstance(part, str) else part for part in parts])]


def shown(renderer: Renderer, messages: list[Message], answer: Sequence[int], **changes: Any) -> Trajectory:
    """That somebody said `answer` to it."""
    ids = renderer.prompt(messages)
    pictures, images = renderer.pictures(messages, ids), images_of(messages)
    mask = [0] * len(ids) + [1] * len(answer)
    return trajectory_of([*ids, *answer], mask, pictures=pictures, images=images, **changes)


def together(trajectories: Sequence[Trajectory]) -> Group:
    """A group of them."""
    group = group_of(list(trajectories))
    bare, images = transcripts.together(group.trajectories)
    group = msgspec.structs.replace(group, trajectories=bare, images=images)
    group.check()
    return group


class Plain:
    """transformers alone: its processor, its forward pass. Of Qwen-VL the image processor, since the whole one needs
    torchvision."""

    def __init__(self, base: Path | str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

        self.model: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype).eval()
        self.has_grids = self.model.config.model_type.startswith("qwen")
        if self.has_grids:
            self.images: Any = AutoImageProcessor.from_pretrained(base, backend="pil")
            self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        else:
            self.processor: Any = AutoProcessor.from_pretrained(base)
        self.image_token_id: int = self.model.config.image_token_id

    def inputs(self, messages: Sequence[Message]) -> dict[str, Any]:
        mark = "<|vision_start|><|image_pad|><|vision_end|>" if self.has_grids else "<image>"
        text = "".join(
            mark if isinstance(part, Image) else part.text
            for message in messages
            for part in ([Text(message.content)] if isinstance(message.content, str) else message.content)
        )
        images = [PIL.Image.open(io.BytesIO(image.data)) for message in messages for image in message.images]
        if self.has_grids:
            return self._on_grids(text, images)
        made = self.processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
        return {name: value for name, value in made.items() if name != "attention_mask"}

    def _on_grids(self, text: str, images: list[Any]) -> dict[str, Any]:
        made = dict(self.images(images, return_tensors="pt")) if images else {}
        first, *others = text.split("<|image_pad|>")
        for grid, after in zip(made.get("image_grid_thw", ()), others, strict=True):
            first += "<|image_pad|>" * (int(grid.prod()) // 4) + after
        ids = self.tokenizer(first, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, **made}

    @contextmanager
    def _image_token(self, token: int) -> Iterator[None]:
        """Which token is an image's placeholder, to transformers."""
        places = [place for place in (self.model.config, self.model.model) if hasattr(place, "image_token_id")]
        for place in places:
            place.image_token_id = token
        try:
            yield
        finally:
            for place in places:
                place.image_token_id = self.image_token_id

    def logprobs(self, messages: Sequence[Message], answer: Sequence[int]) -> F32:
        inputs = self.inputs(messages)
        prompt = inputs.pop("input_ids")
        ids = torch.cat([prompt, torch.tensor([list(answer)])], dim=1)
        placeholders = torch.arange(ids.shape[1]) < prompt.shape[1]
        placeholders = placeholders & (ids == self.image_token_id)
        if self.has_grids and "pixel_values" in inputs:
            inputs["mm_token_type_ids"] = placeholders.int()
        spare = next(token for token in range(ids.numel() + 1) if token not in ids)
        with torch.no_grad(), self._image_token(spare):  # a placeholder that was sampled is no image
            ids = ids.masked_fill(placeholders, spare)
            logits = self.model(input_ids=ids, **inputs).logits[0, prompt.shape[1] - 1 : -1].float()
        found: F32 = logits.log_softmax(-1).gather(-1, torch.tensor(list(answer))[:, None])[:, 0].numpy()
        return found
