"""A model's tokenizer without transformers, and so without torch: what the simulated engine needs, in 0.1 s.

Reads tokenizer.json, tokenizer_config.json and the chat template of a model directory; gives the few methods of a
Hugging Face tokenizer that `Renderer` uses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from opentinker.shared.errors import JobFailed


class LightTokenizer:
    """Raises JobFailed when the directory holds no tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        try:
            self._core: Any = Tokenizer.from_buffer((directory / "tokenizer.json").read_bytes())
            config = orjson.loads((directory / "tokenizer_config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise JobFailed(f"no tokenizer in model {str(directory)!r}: {error}") from None
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self.eos_token_id: int | None = self._core.token_to_id(self._special.get("eos_token", ""))
        template = directory / "chat_template.jinja"
        self.chat_template: str | None = template.read_text() if template.exists() else config.get("chat_template")

    def __len__(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        chat: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """`tokenize` must be False: the caller encodes."""
        assert self.chat_template is not None and not tokenize
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        template = environment.from_string(self.chat_template)
        return template.render(messages=chat, tools=tools, add_generation_prompt=add_generation_prompt, **self._special)


def _to_json(value: Any, **style: Any) -> str:
    """As transformers has it: nothing is escaped for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **style})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
