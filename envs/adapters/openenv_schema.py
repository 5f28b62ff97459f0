"""Converts a policy's turn to an OpenEnv action, and an observation to text, by the server's JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import orjson

from opentinker.envs.adapters.library import Illegal, action_text, last_object
from opentinker.envs.adapters.openenv_client import Observation
from opentinker.envs.base import BadReply
from opentinker.envs.tool_limits import bounded_tools
from opentinker.shared.types.core import Tool

Kind = Literal["text", "json", "tools"]
OURS = ("metadata",)
"""Fields of every action and observation, which the policy neither writes nor sees by default."""
EMPTY: tuple[Any, ...] = ("", [], {})
TOOL_CALL = {"tool_name", "arguments"}
MARK = "What stands after the last `Action:` counts."


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Form of an environment's actions."""

    kind: Kind
    field: str = ""
    """text: the field that the policy's text fills. json: the only field, whose name may be omitted."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    fixed: dict[str, Any] = {}
    """Fields with one possible value, which the policy may omit."""

    def hint(self) -> str:
        if self.kind == "tools":
            return ""
        if self.kind == "text":
            about = _about(self.properties.get(self.field, {}))
            return f"What you say is the {self.field}{f' ({about})' if about else ''}. {MARK}"
        parts = [
            f'"{name}": {_describe(schema, optional=name not in self.required)}'
            for name, schema in self.properties.items()
        ]
        return f"Each turn, say your action as a JSON object: {{{', '.join(parts)}}}. {MARK}"

    def read(self, text: str) -> dict[str, Any]:
        """Return the action in a text. Raise Illegal."""
        text = action_text(text)
        if self.kind == "text":
            if not text:
                raise Illegal("it is empty")
            return {self.field: text, **self.fixed}
        found = last_object(text)
        if found is None and self.field:
            found = {self.field: _value(text)}
        if found is None:
            raise Illegal("it must be a JSON object")
        return {**found, **self.fixed}


def form_of(schema: dict[str, Any], wanted: Kind | None, field: str, fixed: dict[str, Any]) -> Form:
    """Derive the form from the schema of actions: tool calls, one field of text, or JSON. Raise ValueError if none
    fits."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        raise BadReply("the server's /schema has no properties of an action")
    properties = {str(name): part if isinstance(part, dict) else {} for name, part in properties.items()}
    told = {name: part for name, part in properties.items() if name not in OURS and name not in fixed}
    required = [name for name in schema.get("required") or [] if name in told]
    if wanted == "tools" or (wanted is None and not field and told.keys() >= TOOL_CALL):
        return Form(kind="tools")
    if field and field not in told:
        raise ValueError(f"action_field = {field!r}: the server's actions have {', '.join(told) or 'no fields'}")
    lone = (required or list(told))[0] if len(required or list(told)) == 1 else ""
    named = field or lone
    text = named and (field or told[named].get("type") == "string")
    if wanted == "text" and not named:
        raise ValueError(f"actions = 'text': say which by action_field; there are: {', '.join(told) or 'none'}")
    kind: Kind = wanted or ("text" if text else "json")
    return Form(kind=kind, field=named, properties=told, required=required, fixed=fixed)


def tools_of(observation: dict[str, Any]) -> list[Tool]:
    """Return the tools in a server's answer to `list_tools`. Raise BadReply."""
    try:
        listed = msgspec.convert(observation, _Listed)
    except msgspec.ValidationError as error:
        raise BadReply(f"the server's list of tools: {error}") from None
    if not listed.tools:
        raise BadReply("the server has no tools, and its actions are tool calls")
    tools = [Tool(name=tool.name, description=tool.description, parameters=tool.input_schema) for tool in listed.tools]
    try:
        return bounded_tools(tools)
    except ValueError as error:
        raise BadReply(f"the server's tools cannot be offered: {error}") from None


class _ListedTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class _Listed(msgspec.Struct):
    tools: list[_ListedTool]


def result_of(observation: dict[str, Any]) -> str:
    """Return a tool's result as text: its error, the text of its content, or any other value as JSON."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, dict) else error}"
    if isinstance(result, dict):
        content = result.get("content")
        if isinstance(content, list) and content:
            return "\n".join(
                shown(part["text"] if isinstance(part, dict) and "text" in part else part) for part in content
            )
        if result.get("data") is not None:
            return shown(result["data"])
    return shown(result)


def view(seen: Observation, names: list[str]) -> str:
    """Return the named fields as text (`a.b`: b of a), or all non-empty fields. Raise BadReply if no named field
    exists."""
    if names:
        fields = {**seen.observation, "metadata": seen.metadata}
        found = {name: value for name in names for value in _at(fields, name)}
        if not found:
            raise BadReply(f"show = {names}: the observation has {', '.join(fields)}")
    else:
        found = {name: value for name, value in seen.observation.items() if name not in OURS}
    found = {name: value for name, value in found.items() if value is not None and value not in EMPTY}
    if len(found) == 1:
        return shown(*found.values())
    return "\n".join(f"{name}: {shown(value)}" for name, value in found.items())


def shown(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _at(value: Any, path: str) -> Iterator[Any]:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return
        value = value[name]
    yield value


def _value(text: str) -> Any:
    """Return parsed JSON, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _about(schema: dict[str, Any]) -> str:
    return str(schema.get("description", "")).strip().rstrip(".")


def _describe(schema: dict[str, Any], *, optional: bool) -> str:
    """Describe a field: `integer from 1 to 9 (its meaning), optional`."""
    kinds = [schema, *(part for part in schema.get("anyOf") or [] if isinstance(part, dict))]
    values = next((part["enum"] for part in kinds if isinstance(part.get("enum"), list)), None)
    names = [str(part["type"]) for part in kinds if "type" in part]
    kind = f"one of {', '.join(map(shown, values))}" if values else " or ".join(names) or "any value"
    least, most = schema.get("minimum"), schema.get("maximum")
    limits = "".join(f" {word} {limit}" for word, limit in (("from", least), ("to", most)) if limit is not None)
    about = _about(schema)
    return f"{kind}{limits}{f' ({about})' if about else ''}{', optional' if optional else ''}"
