"""What tests of models that see share: pictures, conversations with them, and what transformers makes of both."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import torch

from examples.models.make_seeing import make_seeing
from opentinker.envs.png import png
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.shared.types import trajectories as trajectories_of
from opentinker.shared.types.core import F32, Image, Message, Text
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, trajectory_of

KINDS: dict[str, dict[str, Any]] = {"idefics3": {}, "parts": {"parts": True}}
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
    bare, images = trajectories_of.together(group.trajectories)
    group = msgspec.structs.replace(group, trajectories=bare, images=images)
    group.check()
    return group


class Plain:
    """transformers alone: its processor, its forward pass."""

    def __init__(self, base: Path | str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.model: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype).eval()
        self.processor: Any = AutoProcessor.from_pretrained(base)

    def inputs(self, messages: Sequence[Message]) -> dict[str, Any]:
        text = "".join(
            "<image>" if isinstance(part, Image) else part.text
            for message in messages
            for part in ([Text(message.content)] if isinstance(message.content, str) else message.content)
        )
        images = [PIL.Image.open(io.BytesIO(image.data)) for message in messages for image in message.images]
        made = self.processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
        return {name: value for name, value in made.items() if name != "attention_mask"}

    def logprobs(self, messages: Sequence[Message], answer: Sequence[int]) -> F32:
        inputs = self.inputs(messages)
        prompt = inputs.pop("input_ids")
        ids = torch.cat([prompt, torch.tensor([list(answer)])], dim=1)
        with torch.no_grad():
            logits = self.model(input_ids=ids, **inputs).logits[0, prompt.shape[1] - 1 : -1].float()
        found: F32 = logits.log_softmax(-1).gather(-1, torch.tensor(list(answer))[:, None])[:, 0].numpy()
        return found
