"""Requests of Anthropic's Messages API -> ParsedRequest: `system` is the first message, a `tool_result` a message of
the role tool, so that a conversation becomes what the same one is as a chat."""

from __future__ import annotations

from typing import Any

from opentinker.shared.openai.fields import InvalidField, Json, flag, items, stops, table, text, whole
from opentinker.shared.openai.guides import guide_of
from opentinker.shared.openai.requests import (
    ParsedRequest,
    check_sendable,
    content_of,
    image_of,
    joined,
    model_of,
    refuse_set,
    refuse_unsupported,
    tool_of,
    tools_of,
)
from opentinker.shared.types.core import Image, Message, Text, Tool, ToolCall


def parse_messages(body: Json, session: str = "", *, serving: bool = False) -> ParsedRequest:
    """Parse `POST /v1/messages`. `serving` changes nothing here. Raises InvalidField."""
    refuse_unsupported(body)
    if body.get("n") not in (None, 1):
        raise InvalidField("n is not supported", param="n")
    refuse_set(body, "container", "mcp_servers")
    messages = [
        message for n, given in enumerate(items(body, "messages")) for message in _said(given, f"messages[{n}]")
    ]
    if not messages:
        raise InvalidField("there is no message", param="messages")
    if body.get("system"):
        system = content_of(body["system"], "system", _text, called="blocks")
        messages = [Message(role="system", content=system), *messages]
    tools = tools_of(body, _tool)
    asked = ParsedRequest(
        messages=messages,
        tools=tools,
        guide=guide_of(body, _format(body), "output_config.format", tools),
        session=session,
        max_tokens=whole(body, "max_tokens", 1),
        stop=stops(body, "stop_sequences"),
        model=model_of(body),
        stream=flag(body, "stream"),
    )
    check_sendable(asked, "messages")
    return asked


def _format(body: Json) -> Any:
    return table(body, "output_config").get("format") or body.get("output_format")


def _said(given: Any, where: str) -> list[Message]:
    """Convert one message of Anthropic's into ours; a user's may hold tool results, which become separate messages."""
    if not isinstance(given, dict) or given.get("role") not in ("user", "assistant", "system"):
        raise InvalidField("must be an object with one of the roles user, assistant, system", param=where)
    content, role = given.get("content"), given["role"]
    if content is None or isinstance(content, str):
        return [Message(role=role, content=content or "")]
    if not isinstance(content, list):
        raise InvalidField("must be a string or a list of blocks", param=f"{where}.content")
    blocks = [_block(block, role, f"{where}.content[{n}]") for n, block in enumerate(content)]
    if role == "assistant":
        calls = [block for block in blocks if isinstance(block, ToolCall)]
        return [Message(role=role, content=joined([b for b in blocks if isinstance(b, Text)]), tool_calls=calls)]
    messages: list[Message] = []
    parts: list[Text | Image] = []
    for block in blocks:
        if isinstance(block, Message):
            messages += [Message(role=role, content=joined(parts))] if parts else []
            messages.append(block)
            parts = []
        elif not isinstance(block, ToolCall):
            parts.append(block)
    return [*messages, Message(role=role, content=joined(parts))] if parts or not messages else messages


def _block(given: Any, role: str, where: str) -> Text | Image | ToolCall | Message:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text" and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind == "image" and role == "user":
        return _image(given, where)
    if kind == "tool_use" and role == "assistant":
        return _call(given, where)
    if kind == "tool_result" and role == "user":
        content = content_of(given.get("content"), f"{where}.content", _result, called="blocks")
        return Message(role="tool", content=content, tool_call_id=text(given, "tool_use_id", where))
    known = {"user": "text, image and tool_result", "assistant": "text and tool_use"}.get(role, "text")
    raise InvalidField(f"blocks of type {known} are understood in messages of the role {role}", param=where)


def _image(given: Json, where: str) -> Image:
    source = given.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise InvalidField("images are taken with a source of type base64", param=where)
    return image_of(source.get("media_type"), source.get("data"), where)


def _call(given: Json, where: str) -> ToolCall:
    name, arguments = given.get("name"), given.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidField("must be a call of a tool, with its name and an object as input", param=where)
    return ToolCall(id=text(given, "id", where), name=name, arguments=arguments)


def _result(given: Any, where: str) -> Text | Image:
    part = _block(given, "user", where)
    if not isinstance(part, Text | Image):
        raise InvalidField("blocks of type text and image are understood in a result", param=where)
    return part


def _text(given: Any, where: str) -> Text:
    part = _block(given, "system", where)
    assert isinstance(part, Text)
    return part


def _tool(given: Any, where: str) -> Tool:
    if isinstance(given, dict) and given.get("type", "custom") not in (None, "custom"):
        kind = f"tools of type {given['type']!r:.60} are not supported"
        raise InvalidField(f"must be a tool of the client's own; {kind}", param=where)
    return tool_of(given, "input_schema", where, where)
