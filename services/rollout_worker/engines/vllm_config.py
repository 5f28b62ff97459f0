"""Derives vLLM's arguments for a model and for adapters from their configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from opentinker.services.rollout_worker.engines.base import EngineError
from opentinker.shared.runtime.memory import memory_bytes
from opentinker.shared.spec import LoraSpec
from opentinker.shared.spec.rollout import AdapterServing
from opentinker.shared.spec.serving import MAX_LORA_RANK
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import TensorInfo

MAX_DEFAULT_CONTEXT = 4096
CPU_KV_SHARE = 0.06
"""Share of the memory of the machine or container that the KV cache may take on a CPU."""
CPU_KV_FLOOR = 32 << 20
CPU_BLOCK = 128
"""Tokens per KV block on a CPU."""
EMPTY_SLOTS_ON_CPU = 1
"""For adapters. Beside requests with one, vLLM computes those without any with what is in the last slot (on a GPU it
skips them): nothing may be there."""

MERGEABLE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose linear layers have the names and shapes of their files, and nothing shares their weights."""


ROUNDED = (
    "with dtype = 'bfloat16', rollout.lora = 'auto' does not merge: rounding would move logprobs from the trainer's"
)
ON_GPU = "on GPUs rollout.lora = 'auto' does not merge: a swap would copy the whole base to the GPU"
"""The gain in generation must be measured there before it can be weighed against that."""
SCORED_TOKENS = 512
"""Tokens of a prompt in one pass, where log-probabilities of prompts are asked for: vLLM makes those of the whole
vocabulary for each, in float32 (twice 0.3 GB for 152k tokens)."""


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """Adapters that a process can hold."""

    rank: int
    """The largest; vLLM pads the others."""
    at_once: int
    """In use by running requests at the same time; a request with another one waits."""
    beside_base: bool = False
    """Requests without an adapter come too."""
    serving: AdapterServing = "adapter"
    """`auto` and `merged`: there is one adapter, which may be merged into the base."""
    separate_because: str = ""
    """Why there is no choice."""


def context_limit(config: PretrainedConfig) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", MAX_DEFAULT_CONTEXT))


def cpu_kv_bytes(config: PretrainedConfig, dtype: str, context: int, concurrent: int, ranks: int = 1) -> int:
    """A quarter of what `concurrent` full contexts need (most stay shorter; the rest wait), if there is memory for it.
    The number is for each of the `ranks`, which divide the heads among them.

    Small matters: the cache is zeroed at start, at 0.4 GiB/s.
    """
    text = config.get_text_config()
    heads = max((getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // ranks, 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * size * getattr(torch, dtype).itemsize
    one = token * (-(-context // CPU_BLOCK) + 1) * CPU_BLOCK
    return int(max(2 * one, min(one * concurrent // 4, int(memory_bytes() * CPU_KV_SHARE / ranks)), CPU_KV_FLOOR))


def lora_arguments(limits: AdapterLimits, on_cpu: bool) -> dict[str, Any]:
    """Return arguments for adapters in vLLM's layers: limits per batch and in memory."""
    at_once, held = limits.at_once, 2 * limits.at_once
    if limits.beside_base:
        at_once = held = limits.at_once + (EMPTY_SLOTS_ON_CPU if on_cpu else 0)
    return {
        "enable_lora": True,
        "max_lora_rank": lora_rank_limit(limits.rank),
        "max_loras": at_once,
        "max_cpu_loras": held,
    }


def lora_rank_limit(rank: int) -> int:
    """vLLM takes these ranks only; smaller adapters are padded."""
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, MAX_LORA_RANK)
    fitting = [limit for limit in allowed if limit >= rank]
    if not fitting:
        raise ValueError(f"LoRA rank {rank} is above {allowed[-1]}, the largest that vLLM serves")
    return fitting[0]


def why_not_merged(config: PretrainedConfig) -> str:
    """Return why an adapter of this model cannot be merged into its weights; empty if it can."""
    if getattr(config, "quantization_config", None):
        return "its weights are quantized"
    if config.model_type not in MERGEABLE:
        return f"it is a {config.model_type} model; adapters are merged into {', '.join(MERGEABLE)}"
    return ""


def why_separate(model: str, config: PretrainedConfig, limits: AdapterLimits, dtype: str, on_cpu: bool) -> str:
    """Return why the one adapter of a process is not merged; empty if it is, or if the job does not want it. Raises
    JobFailed where the job insists on it and the model does not allow it."""
    if limits.serving == "adapter":
        return limits.separate_because
    why = why_not_merged(config)
    if why and limits.serving == "merged":
        raise JobFailed(f"rollout.lora = 'merged' does not work with {model!r}: {why}. Leave it at 'auto'")
    if limits.serving == "auto" and not why:
        return ROUNDED if dtype == "bfloat16" else "" if on_cpu else ON_GPU
    return why


def adapter_scale(directory: Path) -> float:
    """Return the factor of B A in an adapter that a trainer here has saved. Raises EngineError."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        return float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the adapter in {directory} cannot be read: {error!r}") from None


def write_adapter_config(directory: Path, model: str, lora: LoraSpec, manifest: list[TensorInfo]) -> None:
    modules = {info.name.split(".lora_")[0].rpartition(".")[2] for info in manifest if ".lora_" in info.name}
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
