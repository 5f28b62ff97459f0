"""What differs between families of vision models: one row each. `vision.py` does the work, `vllm_images.py` knows how
vLLM takes their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its image processor other than pixels."""
    has_grids: bool = False
    """An image is a grid of tokens of any height and width, and positions have three dimensions (M-RoPE, see
    `grid_positions.py`). Its Hugging Face processor cannot be loaded without torchvision, because of videos; the image
    processor can."""
    around: tuple[str, str] = ("", "")
    """Control tokens that stand around an image's placeholder in the family's chat templates."""


QWEN = Family(has_grids=True, around=("<|vision_start|>", "<|vision_end|>"))

FAMILIES: dict[str, Family] = {
    "idefics3": Family(options={"return_row_col_info": True}),
    "llava": Family(),
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
}
"""By `model_type`; `shared/data/model_families.py` repeats the names for processes without torch."""
VISION_MODULES = r".*\b(vision_model|vision_tower|visual|connector|multi_modal_projector)\b.*"
"""Names of modules that are not part of the language model: vision towers and connectors. They get no adapters."""
