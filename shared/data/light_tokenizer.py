"""A model's tokenizer without transformers, and so without torch: what the simulated engine needs, in 0.1 s.

Reads tokenizer.json, tokenizer_config.json (or special_tokens_map.json, if that is all there is) and the chat templates
of a model directory; gives the few methods of a Hugging Face tokenizer that `Renderer` uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from opentinker.shared.types.errors import JobFailed


class LightTokenizer:
    """Raises JobFailed when the directory holds no tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        try:
            self._core: Any = Tokenizer.from_buffer((directory / "tokenizer.json").read_bytes())
            config = _config(directory)
            self.chat_template: str | dict[str, str] | None = _templates(directory, config)
        except (OSError, ValueError) as error:
            raise JobFailed(f"no tokenizer in model {str(directory)!r}: {error}") from None
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self.eos_token_id: int | None = self._core.token_to_id(self._special.get("eos_token", ""))

    @property
    def backend_tokenizer(self) -> Any:
        return self._core

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
        """`tokenize` must be False: the caller encodes. Raises jinja2.TemplateSyntaxError where the template says what
        is not known here."""
        assert not tokenize
        template = _compiled(self._template(with_tools=tools is not None))
        return template.render(messages=chat, tools=tools, add_generation_prompt=add_generation_prompt, **self._special)

    def _template(self, *, with_tools: bool) -> str:
        """Return the template; of several the one named `default`, or `tool_use` if tools are offered."""
        if not isinstance(self.chat_template, dict):
            assert self.chat_template is not None
            return self.chat_template
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.chat_template:
                return self.chat_template[name]
        raise jinja2.TemplateError(f"none of them is named default: {', '.join(sorted(self.chat_template))}")


@lru_cache(32)
def _compiled(template: str) -> jinja2.Template:
    """Raise jinja2.TemplateSyntaxError. Cached: compilation costs more than all the rest of a turn."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = time.strftime
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _config(directory: Path) -> dict[str, Any]:
    """A directory may have neither file: no special token is named then. Raises OSError, ValueError."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := directory / name).is_file():
            config = orjson.loads(file.read_bytes())
            if not isinstance(config, dict):
                raise ValueError(f"{name} is not an object")
            return config
    return {}


def _templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """One, or several by name. Raises OSError, ValueError."""
    found = config.get("chat_template")
    if isinstance(found, list):
        try:
            found = {each["name"]: each["template"] for each in found}
        except (KeyError, TypeError):
            raise ValueError("chat_template is no list of named templates") from None
    alone = directory / "chat_template.jinja"
    named = {file.stem: file.read_text() for file in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if alone.is_file():
        found = alone.read_text()
    if named:
        return named | ({"default": found} if isinstance(found, str) else found or {})
    return found


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for those who train on it: the text is the same."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(value: Any, **style: Any) -> str:
    """Encode as transformers does, without escapes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **style})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
