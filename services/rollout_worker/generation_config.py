"""Tokens with which a model ends its output, from its configuration."""

from __future__ import annotations


def end_tokens(base: str) -> list[int]:
    """Return them from generation_config.json, which knows about end-of-turn tokens; else from config.json."""
    from transformers import GenerationConfig, PretrainedConfig

    try:
        ids = GenerationConfig.from_pretrained(base).eos_token_id
    except OSError:  # the model has no such file
        ids = None
    if ids is None:
        config, _ = PretrainedConfig.get_config_dict(base)
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
