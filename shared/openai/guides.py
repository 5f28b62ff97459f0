"""Reads a request's constraints on the answer: `tool_choice` and text format, in OpenAI's and Anthropic's forms."""

from __future__ import annotations

from typing import Any

from opentinker.shared.openai.fields import InvalidField, Json
from opentinker.shared.types import codec
from opentinker.shared.types.core import Tool
from opentinker.shared.types.guide import MAX_SCHEMA_BYTES, Guide


def guide_of(body: Json, form: Any, where: str, tools: list[Tool]) -> Guide | None:
    """Return what `tool_choice` and the format of the text, which stands at `where`, force; None for nothing."""
    call, schema = _forced_call(body, [tool.name for tool in tools]), schema_of(form, where)
    return None if call is None and schema is None else Guide(call=call, schema=schema)


def is_told_of_tools(body: Json) -> bool:
    """Return whether `tool_choice` lets the model see the tools."""
    return bool(_choice(body)[0] != "none")


def _choice(body: Json) -> tuple[Any, Json]:
    """Return the word of `tool_choice`, and where it is an object, that."""
    choice = body.get("tool_choice")
    return (choice.get("type"), choice) if isinstance(choice, dict) else (choice, {})


def _forced_call(body: Json, offered: list[str]) -> str | None:
    """Return the tool that must be called, in OpenAI's forms or Anthropic's: empty for any, None for no force."""
    word, choice = _choice(body)
    if word in (None, "auto", "none"):
        return None
    if word in ("required", "any"):
        name: Any = ""
    elif word in ("function", "tool"):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in offered:
            raise InvalidField(f"names a tool that is not offered: {name!r:.100}", param="tool_choice")
    else:
        raise InvalidField("must be auto, none, required or any, or name a function", param="tool_choice")
    if not offered:
        raise InvalidField("forces a call, and no tool is offered", param="tool_choice")
    return str(name)


def schema_of(form: Any, where: str) -> Json | None:
    """Return the JSON schema of a format, in OpenAI's forms or Anthropic's; None for text."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise InvalidField("must have the type text, json_object or json_schema", param=where)
    inside = form.get("json_schema", form)
    schema = inside.get("schema") if isinstance(inside, dict) else None
    if not isinstance(schema, dict):
        raise InvalidField("must have a schema, which is an object", param=where)
    try:
        size = len(codec.encode(schema))
    except (OverflowError, ValueError, RecursionError) as error:
        raise InvalidField(f"the schema cannot be sent: {error}", param=where) from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidField(f"the schema has {size:,} bytes; at most {MAX_SCHEMA_BYTES:,} are allowed", param=where)
    return schema
