"""Sampling parameters of a request; unsupported ones are refused, never ignored."""

from __future__ import annotations

import msgspec

from opentinker.shared.openai.fields import InvalidField, Json, flag, number, whole

BOTH = frozenset(
    {"model", "max_tokens", "stop", "stream", "stream_options", "logprobs", "temperature", "top_p", "top_k", "seed"}
    | {"n", "best_of", "response_format"}
)
"""Read here or in requests.py, for chats and for completions."""
CHAT = BOTH | {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"}
COMPLETION = BOTH | {"prompt", "echo", "suffix"}
INERT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Say nothing about what is sampled."""
USUAL: Json = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0}
"""Values that are accepted because they change nothing."""
MAX_TEMPERATURE = 10.0
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request."""

    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    """None: drawn at random."""


def parse_manner(body: Json, *, chat: bool) -> SamplingParams:
    """Raises Refused, also for anything in the body that would have no effect."""
    read, others, route = (CHAT, COMPLETION, "chat/completions") if chat else (COMPLETION, CHAT, "completions")
    for name in sorted(body.keys() - read - INERT):
        if body[name] is not None and (name not in USUAL or body[name] != USUAL[name]):
            raise InvalidField(f"{name} is not supported{f' at {route}' * (name in others)}", param=name)
    if body.get("parallel_tool_calls") is not None and not flag(body, "parallel_tool_calls"):
        raise InvalidField(
            "parallel_tool_calls can only be true: nothing forces what is sampled", param="parallel_tool_calls"
        )
    temperature, top_p = number(body, "temperature", 0, MAX_TEMPERATURE), number(body, "top_p", 0, 1, above=True)
    top_k, seed = body.get("top_k"), whole(body, "seed", 0)
    if seed is not None and seed > MAX_SEED:
        raise InvalidField(f"must be at most {MAX_SEED}", param="seed")
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k == -1 else whole(body, "top_k", 0) or 0,
        seed=seed,
    )
