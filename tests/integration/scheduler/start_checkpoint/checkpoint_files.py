"""Files of checkpoints, and jobs that have or want one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file

from tests.support.factories import make_spec

LORA = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
STATE = {"trainer/optimizer.safetensors": b"moments", "trainer/state.json": b"{}"}


def tensors(directory: Path, **shapes: tuple[int, ...]) -> bytes:
    """A safetensors file; double underscores in a name are dots."""
    path = directory / "made.safetensors"
    save_file({name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path.read_bytes()


def adapter_files(directory: Path, rank: int = 2, alpha: float = 4.0) -> dict[str, bytes]:
    layer = "base_model__model__model__layers__0__self_attn__"
    return {
        "adapter_model.safetensors": tensors(
            directory,
            **{f"{layer}{module}__lora_A__weight": (rank, 8) for module in ("q_proj", "v_proj")},
            **{f"{layer}{module}__lora_B__weight": (8, rank) for module in ("q_proj", "v_proj")},
        ),
        "adapter_config.json": orjson.dumps({"r": rank, "lora_alpha": alpha}),
        **STATE,
    }


def full_files(directory: Path, **changed: tuple[int, ...]) -> dict[str, bytes]:
    shapes = {"model__embed__weight": (40, 8), "model__layers__0__mlp__weight": (8, 8), **changed}
    return {"config.json": b"{}", "model.safetensors": tensors(directory, **shapes), **STATE}


def spec_of(base: object, **changes: Any) -> dict[str, Any]:
    """A job that really trains, as plain data."""
    fields: dict[str, Any] = {"model": {"base": str(base), "chat_template": "plain"}, "rollout": {}}
    fields |= {"train": {"steps": 3, "checkpoint_every": 2}}
    return make_spec(**{**fields, **changes}).model_dump(mode="json")


def model_of(base: object, **lora: Any) -> dict[str, Any]:
    return {"base": str(base), "chat_template": "plain", "lora": {**LORA, **lora}}
