"""Requests of OpenAI's Responses API -> ParsedRequest.

Nothing is stored: the whole conversation stands in `input`. An assistant's text and the calls right after it are one
message, as they are in a chat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentinker.shared.openai.fields import InvalidField, Json, flag, items, table, text, whole
from opentinker.shared.openai.guides import guide_of
from opentinker.shared.openai.requests import (
    MAX_LIKELY_CHAT,
    ROLES,
    ParsedRequest,
    call_of,
    check_sendable,
    content_of,
    image_in_url,
    model_of,
    most_likely,
    refuse_set,
    refuse_unsupported,
    tool_of,
    tools_of,
)
from opentinker.shared.types.core import Image, Message, Text, Tool

LOGPROBS = "message.output_text.logprobs"
REPEATED = ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "text")
"""Fields that the answer repeats; so do `max_output_tokens` and `truncation`."""
ABSENT = {"reasoning.encrypted_content"}
"""Values of `include` that add nothing here: there is no reasoning apart from the text."""


def parse_responses(body: Json, session: str = "", *, serving: bool = False) -> ParsedRequest:
    """Parse `POST /v1/responses`. `serving` as for chats. Raises InvalidField."""
    refuse_unsupported(body)
    if body.get("n") not in (None, 1):
        raise InvalidField("n is not supported", param="n")
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise InvalidField(f"{name}: responses are not stored; send the whole conversation in input", param=name)
    refuse_set(body, "background", "prompt", "max_tool_calls")
    if body.get("truncation") not in (None, "disabled"):
        raise InvalidField(
            'truncation can only be "disabled": a prompt that is too long is refused', param="truncation"
        )
    form = table(body, "text")
    logprobs = _logprobs(body)
    top = most_likely(body, "top_logprobs", MAX_LIKELY_CHAT, serving)
    if top and not logprobs:
        raise InvalidField(f'top_logprobs needs include = ["{LOGPROBS}"]', param="top_logprobs")
    messages = _input(body.get("input"))
    if instructions := text(body, "instructions", "(body)"):
        messages = [Message(role="system", content=instructions), *messages]
    if not messages:
        raise InvalidField("there is no message", param="input")
    tools = tools_of(body, _tool)
    asked = ParsedRequest(
        messages=messages,
        tools=tools,
        guide=guide_of(body, form.get("format"), "text.format", tools),
        session=session,
        max_tokens=whole(body, "max_output_tokens", 1),
        model=model_of(body),
        stream=flag(body, "stream"),
        logprobs=logprobs,
        likely=top or 0,
        repeated={name: body[name] for name in REPEATED if body.get(name) is not None},
    )
    check_sendable(asked, "input")
    return asked


def _logprobs(body: Json) -> bool:
    """Return whether `include` asks for logprobs."""
    wanted = {name if isinstance(name, str) else "" for name in items(body, "include")} - ABSENT
    if others := wanted - {LOGPROBS}:
        raise InvalidField(f"{min(others)!r:.100} cannot be included", param="include")
    return bool(wanted)


def _input(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)] if given else []
    if not isinstance(given, list):
        raise InvalidField("must be a string or a list of items", param="input")
    messages: list[Message] = []
    kind = ""
    for n, item in enumerate(given):
        where, before = f"input[{n}]", kind
        if not isinstance(item, dict):
            raise InvalidField("must be an object", param=where)
        kind = item.get("type") or "message"
        if kind not in ITEMS:
            raise InvalidField(f"items of type {', '.join(ITEMS)} are understood", param=where)
        message = ITEMS[kind](item, where)
        if kind == "function_call" and messages and _is_continued(messages[-1], before):
            said = messages.pop()
            message = Message(
                role="assistant", content=said.content, tool_calls=[*said.tool_calls, *message.tool_calls]
            )
        messages.append(message)
    return messages


def _is_continued(last: Message, kind: str) -> bool:
    return kind == "function_call" or (kind == "message" and last.role == "assistant")


def _message(item: Json, where: str) -> Message:
    if item.get("role") not in ROLES or item["role"] == "tool":
        raise InvalidField("must have one of the roles user, assistant, system, developer", param=where)
    return Message(role=ROLES[item["role"]], content=content_of(item.get("content"), f"{where}.content", _part))


def _function_call(item: Json, where: str) -> Message:
    return Message(role="assistant", tool_calls=[call_of(item, text(item, "call_id", where), where)])


def _function_call_output(item: Json, where: str) -> Message:
    content = content_of(item.get("output"), f"{where}.output", _part)
    return Message(role="tool", content=content, tool_call_id=text(item, "call_id", where))


ITEMS: dict[str, Callable[[Json, str], Message]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}
TEXTS = ("input_text", "output_text", "text")


def _part(given: Any, where: str) -> Text | Image:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in TEXTS and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind == "input_image":
        return image_in_url(given.get("image_url"), where)
    raise InvalidField("parts of type input_text, output_text and input_image are understood", param=where)


def _tool(given: Any, where: str) -> Tool:
    if isinstance(given, dict) and given.get("type", "function") != "function":
        raise InvalidField(f"must be a function; tools of type {given['type']!r:.60} are not supported", param=where)
    return tool_of(given, "parameters", where, where)
