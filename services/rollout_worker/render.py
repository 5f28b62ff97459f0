"""Messages -> token ids, and sampled ids -> text. Token in, token out: sampled ids are never decoded and re-encoded.

The first prompt is the chat template's rendering. What follows a model turn is the template's text after an assistant
message, rendered once with a marker in the place of the model's own words, so that only new text is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker.shared import codec
from opentinker.shared.errors import JobFailed
from opentinker.shared.types import Message, Tool

MARKER = "ANSWER0MARKER"


class Renderer:
    """`mode` is the spec's model.chat_template. Raises JobFailed when the tokenizer cannot do what it asks."""

    def __init__(self, tokenizer: Any, mode: str, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._plain = mode == "plain"
        self._cache: dict[bytes, list[int]] = {}
        self.eos_ids = eos_ids
        """What ends a turn: the engine stops there too."""
        if not eos_ids:
            raise JobFailed("the model's tokenizer names no end-of-sequence token: set eos_token in its directory")
        if not self._plain and not tokenizer.chat_template:
            raise JobFailed(
                "the model's tokenizer has no chat template; add one to the model directory, "
                'or set model.chat_template = "plain" to join message contents without markup'
            )

    @classmethod
    def load_light(cls, base: str, mode: str) -> Renderer:
        """From a local directory, without transformers; a turn ends with the tokenizer's eos alone."""
        from opentinker.services.rollout_worker.light_tokenizer import LightTokenizer

        tokenizer = LightTokenizer(Path(base))
        return cls(tokenizer, mode, frozenset([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []))

    @classmethod
    def load(cls, base: str, mode: str) -> Renderer:
        """Tokenizer and end-of-turn ids of a Hugging Face model directory or hub id."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(base)
        except (OSError, ValueError) as error:
            raise JobFailed(f"no tokenizer in model {base!r}: {str(error).splitlines()[0]}") from None
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return cls(tokenizer, mode, frozenset([*own, *_configured_ends(base)]))

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def digit_ids(self) -> frozenset[int]:
        """Tokens that are a single digit."""
        return frozenset(ids[0] for d in "0123456789" if len(ids := self._encode(d)) == 1)

    def _template(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool) -> str:
        chat = [as_chat(message) for message in messages]
        offered = {"tools": [as_function(tool) for tool in tools]} if tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generate, **offered
            )
        except Exception as error:  # noqa: BLE001 - a template is the model's code: whatever it raises fails the job
            raise JobFailed(f"the model's chat template refused {[m.role for m in messages]}: {error}") from None
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids up to where the model's first turn begins. Siblings of a group share the work."""
        key = codec.encode([messages, tools])
        if key not in self._cache:
            if len(self._cache) >= 256:
                self._cache.clear()
            text = self._joined(messages, tools) if self._plain else self._template(messages, tools, generate=True)
            self._cache[key] = self._encode(text)
        return list(self._cache[key])

    def _joined(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        if tools:
            raise JobFailed('tools need a chat template that describes them: model.chat_template is "plain"')
        return "".join(_text(message) for message in messages)

    def extend(self, ended_with_eos: bool, messages: Sequence[Message]) -> list[int]:
        """Ids between the model's last sampled token and its next turn."""
        if self._plain:
            return self._encode(self._joined(messages))
        before = [Message(role="user", content="."), Message(role="assistant", content=MARKER)]
        text = self._template([*before, *messages], (), generate=True)
        ids = self._encode(text[text.rindex(MARKER) + len(MARKER) :])
        return ids[1:] if ended_with_eos and ids and ids[0] in self.eos_ids else ids

    def text(self, ids: Sequence[int]) -> str:
        """What the model said, without end-of-turn and other special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def as_chat(message: Message) -> dict[str, Any]:
    """As chat templates take it. Raises JobFailed for images."""
    chat: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.name:
        chat["name"] = message.name
    return chat


def as_function(tool: Tool) -> dict[str, Any]:
    """As chat templates take it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def _text(message: Message) -> str:
    if message.images:
        raise JobFailed("the environment shows images, and models that see are not served yet")
    return message.text


def _configured_ends(base: str) -> list[int]:
    """From generation_config.json, which knows about end-of-turn tokens; else from config.json."""
    from transformers import GenerationConfig, PretrainedConfig

    try:
        ids = GenerationConfig.from_pretrained(base).eos_token_id
    except OSError:  # the model has no such file
        ids = None
    if ids is None:
        config, _ = PretrainedConfig.get_config_dict(base)
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
