"""Decides from config.json alone, before any worker loads a model, whether OpenTinker can train and serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class VisionFamily:
    """Properties of a family of vision models; `vllm_images.py` prepares their inputs for vLLM."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its image processor other than pixels."""
    has_grids: bool = False
    """An image is a grid of tokens of any height and width, and positions have three dimensions (M-RoPE, see
    `grid_positions.py`). Its Hugging Face processor cannot be loaded without torchvision, because of videos; the image
    processor can."""
    around: tuple[str, str] = ("", "")
    """Control tokens that stand around an image's placeholder in the family's chat templates."""


QWEN = VisionFamily(has_grids=True, around=("<|vision_start|>", "<|vision_end|>"))
VISION_FAMILIES = {
    "idefics3": VisionFamily(options={"return_row_col_info": True}),
    "llava": VisionFamily(),
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
}
"""Models that images can be shown to, by `model_type`."""
VISION_MODULES = r".*\b(vision_model|vision_tower|visual|connector|multi_modal_projector)\b.*"
"""Names of modules that are not part of the language model: vision towers and connectors. They get no adapters."""
LLAVA_TOWER = "clip_vision_model"
"""Vision tower of `llava` models that are supported. Pixtral's gives an image any number of tokens, row by row."""
TEXT_OF_VISION = (*("gemma3", "gemma3n", "gemma4", "llama4", "mllama", "qwen3_5", "qwen3_5_moe"), *VISION_FAMILIES)
"""Vision models that transformers also loads as language models: rows of text can train them."""
TOWER_CONFIGS = ("vision_config", "audio_config", "vision_encoder", "visual", "thinker_config", "speech_config")
"""Entries of a config.json that describe a tower in addition to the language model."""
CONDITIONAL = "ForConditionalGeneration"
"""Suffix of the architectures of vision, audio and encoder-decoder models."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Dimensions of an attention head that vLLM's kernels for CPUs take."""


def unsupported_family(config: Mapping[str, Any], *, served: bool) -> str:
    """Return why no job can use a model with this config.json; empty if it can. `served`: vLLM loads it."""
    kind = config.get("model_type")
    tower = config.get("vision_config")
    name = tower.get("model_type", LLAVA_TOWER) if isinstance(tower, dict) else LLAVA_TOWER
    if kind == "llava" and name != LLAVA_TOWER:
        return f"is a llava model with a {name}; OpenTinker trains and serves those with a {LLAVA_TOWER}"
    if kind == "qwen3_vl" and served and not _interleaves_positions(config):
        return (
            "is a qwen3_vl model without mrope_interleaved = true in its text_config's rope_parameters; OpenTinker "
            "trains and serves those that have it: else vLLM and transformers place images differently"
        )
    if kind in (VISION_FAMILIES if served else TEXT_OF_VISION):
        return ""
    if config.get("is_encoder_decoder"):
        return f"is a {kind} model, an encoder-decoder; OpenTinker trains and serves decoders of text"
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    text_only = not any(isinstance(config.get(name), dict) for name in TOWER_CONFIGS)
    if text_only and not any(str(name).endswith(CONDITIONAL) for name in names):
        return ""
    types = ", ".join(VISION_FAMILIES)
    return (
        f"is a {kind} model; OpenTinker trains and serves text models, and of models that see {types}: take a text "
        "model, or SmolVLM-256M-Instruct for images"
    )


def _interleaves_positions(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    rope = (text.get("rope_parameters") or text.get("rope_scaling")) if isinstance(text, Mapping) else None
    return isinstance(rope, Mapping) and rope.get("mrope_interleaved") is True


def unsupported_on_cpu(config: Mapping[str, Any]) -> str:
    """Return why vLLM cannot serve a model with this config.json on CPUs; empty if it can."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    heads, width, size = (text.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if "kv_lora_rank" in text or not (isinstance(heads, int) and heads > 0 and isinstance(width, int)):
        return ""
    size = size if isinstance(size, int) and size > 0 else width // heads
    if size in CPU_HEAD_SIZES:
        return ""
    allowed = ", ".join(map(str, CPU_HEAD_SIZES))
    return f"has attention heads of {size} dimensions; vLLM on CPUs takes {allowed}: take another model, or a GPU"


def indivisible(config: Mapping[str, Any], ranks: int) -> str:
    """Return why a model with this config.json cannot be divided among this many ranks; empty if it can."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and heads % ranks:
        return f"has {heads} attention heads, which {ranks} ranks cannot share equally"
    if isinstance(shared, int) and shared > 0 and shared % ranks and ranks % shared:
        return f"has {shared} key-value heads, which {ranks} ranks cannot share equally"
    width = text.get("intermediate_size")
    if isinstance(width, int) and width % ranks:
        return f"has an intermediate_size of {width}, which {ranks} ranks cannot share equally"
    return ""


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory; empty if it cannot be read, of which others have more to say. Blocking."""
    try:
        config = orjson.loads((directory / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return config if isinstance(config, dict) else {}
