"""Directories of adapters that no model needs: for caches, and for engines that do not compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file


def write_adapter(directory: Path, *, rank: int = 4, value: float = 0.5, dtype: type = np.float32) -> Path:
    """A PEFT directory of one layer whose numbers are all `value`."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_bytes(orjson.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (rank, 8), "lora_B": (8, rank)}
    tensors: dict[str, Any] = {f"{layer}.{name}.weight": np.full(shape, value, dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
