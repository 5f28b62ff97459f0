"""vLLM's classes of Qwen-VL on machines without torchvision, which has no build for CPUs.

They import the image processor that needs it, for one function, and load Hugging Face's processor of images and videos,
to know the largest number of tokens. Images reach vLLM processed (`vllm_images.py`) and videos never, so transformers'
Pillow version of the same module takes the place of the former, and the context length bounds an image's tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

QWEN_VL = ("Qwen2VL", "Qwen2_5_VL")
"""Architectures begin so."""
IMPORTED = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
WITH_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def load_class(architecture: str, registered: Any) -> Any:
    """Load vLLM's class of an architecture from its entry in the model registry."""
    if not architecture.startswith(QWEN_VL) or importlib.util.find_spec("torchvision") is not None:
        return registered.load_model_cls()
    sys.modules.setdefault(IMPORTED, importlib.import_module(WITH_PILLOW))
    loaded = registered.load_model_cls()
    loaded._processor_factory = _images_alone(loaded._processor_factory)
    return loaded


def _images_alone(factories: Any) -> Any:
    class ImagesAlone(factories.info):  # type: ignore[misc]
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return {"image": seq_len}

    return dataclasses.replace(factories, info=ImagesAlone)
