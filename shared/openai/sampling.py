"""Sampling parameters of a request; unsupported ones are refused, never ignored."""

from __future__ import annotations

import msgspec

from opentinker.shared.openai.fields import InvalidField, Json, flag, number, whole

SAMPLED = frozenset({"model", "stream", "temperature", "top_p", "top_k", "seed"})
OPENAI = (
    SAMPLED
    | {"max_tokens", "stop", "stream_options", "logprobs", "n", "best_of", "response_format"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"}
)
READ = {
    "chat/completions": OPENAI
    | {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"},
    "completions": OPENAI | {"prompt", "echo", "suffix"},
    "responses": SAMPLED
    | {"input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "top_logprobs"}
    | {"include", "text", "truncation", "stream_options"}
    | {"previous_response_id", "conversation", "background", "prompt", "max_tool_calls"},
    "messages": SAMPLED
    | {"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences"}
    | {"output_config", "output_format", "container", "mcp_servers"},
}
"""By route: fields that are read, or refused, here or where its requests are parsed."""
INERT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "cache_control", "inference_geo"}
)
"""Say nothing about what is sampled."""
USUAL: Json = {
    "min_tokens": 0,
    "thinking": {"type": "disabled"},
}
"""Values that are accepted because they change nothing."""
MAX_TEMPERATURE = 2.0
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
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest one's probability are excluded."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def reshapes(self) -> bool:
        """Return whether anything but temperature, top_p and top_k changes the distribution."""
        neutral = SamplingParams()
        names = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        return any(getattr(self, name) != getattr(neutral, name) for name in names)


def parse_manner(body: Json, route: str) -> SamplingParams:
    """Raises InvalidField, also for anything in the body that would have no effect."""
    elsewhere = frozenset().union(*READ.values())
    for name in sorted(body.keys() - READ[route] - INERT):
        if body[name] is not None and (name not in USUAL or body[name] != USUAL[name]):
            raise InvalidField(f"{name} is not supported{f' at {route}' * (name in elsewhere)}", param=name)
    for name in ("text", "output_config"):
        if others := _keys(body.get(name)) - {"format"}:
            raise InvalidField(f"{name}.{min(others)} is not supported", param=name)
    if _forbids_parallel_calls(body):
        raise InvalidField(
            "parallel_tool_calls can only be true: nothing forces what is sampled", param="parallel_tool_calls"
        )
    temperature, top_p = number(body, "temperature", 0, MAX_TEMPERATURE), number(body, "top_p", 0, 1, above=True)
    repetition = number(body, "repetition_penalty", 0, 2, above=True)
    top_k, seed = body.get("top_k"), whole(body, "seed", 0)
    if seed is not None and seed > MAX_SEED:
        raise InvalidField(f"must be at most {MAX_SEED}", param="seed")
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k == -1 else whole(body, "top_k", 0) or 0,
        seed=seed,
        min_p=number(body, "min_p", 0, 1) or 0.0,
        presence_penalty=number(body, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=number(body, "frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
    )


def _keys(given: object) -> set[str]:
    return {name for name, value in given.items() if value is not None} if isinstance(given, dict) else set()


def _forbids_parallel_calls(body: Json) -> bool:
    """Return whether a request forbids parallel tool calls, in OpenAI's or Anthropic's form."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and flag(choice, "disable_parallel_tool_use"):
        return True
    return body.get("parallel_tool_calls") is not None and not flag(body, "parallel_tool_calls")
