"""vLLM's classes of Qwen-VL and LLaVA, changed where they do not fit this machine or transformers' names.

torchvision has no build for CPUs. The classes import image processors that need it, for one function each, and those of
Qwen-VL load Hugging Face's processor of images and videos, to know the largest number of tokens. Images reach vLLM
processed (`vllm_images.py`) and videos never, so transformers' Pillow versions of the same modules take the place of
the former, and the context length bounds an image's tokens.

transformers names the modules of LLaVA's tower without the `vision_model` that published checkpoints and vLLM have.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

QWEN_VL = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
LLAVA = ("LlavaFor",)
"""Prefixes of architecture names."""
IMAGE_PROCESSORS = ("qwen2_vl", "pixtral")
"""Packages of transformers whose image processors are imported."""
NAMES_OF_TRANSFORMERS = {re.compile(r"^(?:model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}


def register_classes(registry: Any, architectures: Sequence[str]) -> None:
    """Tell vLLM's model registry the model's class, which it would else find out with a subprocess that imports
    everything again."""
    for name in architectures:
        known = registry.models.get(name)
        if known is not None:
            registry.register_model(name, load_class(name, known))


def load_class(architecture: str, registered: Any) -> Any:
    """Load vLLM's class of an architecture from its entry in the model registry."""
    if not architecture.startswith((*QWEN_VL, *LLAVA)):
        return registered.load_model_cls()
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    if not has_torchvision:
        for name in IMAGE_PROCESSORS:
            module = f"transformers.models.{name}.image_processing"
            sys.modules.setdefault(f"{module}_{name}", importlib.import_module(f"{module}_pil_{name}"))
    loaded = registered.load_model_cls()
    if architecture.startswith(LLAVA):
        names = {**loaded.hf_to_vllm_mapper.orig_to_new_regex, **NAMES_OF_TRANSFORMERS}
        loaded.hf_to_vllm_mapper = dataclasses.replace(loaded.hf_to_vllm_mapper, orig_to_new_regex=names)
    elif not has_torchvision:
        loaded._processor_factory = _images_alone(loaded._processor_factory)
    return loaded


def _images_alone(factories: Any) -> Any:
    class ImagesAlone(factories.info):  # type: ignore[misc]
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return {"image": seq_len}

    return dataclasses.replace(factories, info=ImagesAlone)
