"""Parses a model's output -> content, the tools it calls, or why something that looks like a call is invalid.

Each format is what models of one family are trained to write; `recognise` finds it in the chat template that teaches
it. vLLM has parsers for these too, which the tests hold against ours: they give up a malformed call as plain text,
where a policy that learns has to be told what was wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from opentinker.shared.types import codec
from opentinker.shared.types.core import StopReason, Tool, ToolCall
from opentinker.shared.types.guide import Guide

MAX_CALLS = 8
"""In one turn."""
SHOWN = 60
"""Characters of a wrong value that the policy is shown."""

Found = tuple[str, Any]
"""Name and arguments, as they were written."""


class ParsedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Either calls or a problem, or neither where the text only says something."""

    calls: list[ToolCall] = []
    problem: str = ""
    words: str = ""
    """Text before the first call."""


class Malformed(Exception):
    """An intended but invalid call, with the reason."""


class Cut(Malformed):
    """It ends before its end."""


def parse(form: str, text: str, tools: Sequence[Tool], *, stop: StopReason, turn: int) -> ParsedReply:
    """`text` has the model's special tokens in it. The calls' ids are unique in an episode, for `turn` is.

    Several calls in one turn are taken in order. If one is malformed, none of them is a call.
    """
    try:
        found = list(FORMATS[form].find(text, tools))
        if len(found) > MAX_CALLS:
            raise Malformed(f"{len(found)} tools were called in one turn; at most {MAX_CALLS} can be")
        calls = [_call(one, f"t{turn:05d}n{place:02d}") for place, one in enumerate(found)]
        begun = FORMATS[form].begins.search(text) if calls else None
        return ParsedReply(calls=calls, words="" if begun is None else text[: begun.start()].strip())
    except Cut as error:
        if stop in (StopReason.LENGTH, StopReason.CONTEXT):
            return ParsedReply(problem="the tool call was cut off, because the turn was too long; be shorter")
        return ParsedReply(problem=f"{error}. {_how(form)}")
    except Malformed as error:
        return ParsedReply(problem=f"{error}. {_how(form)}")


def recognise(template: str) -> str | None:
    """Return the format that a chat template teaches; None if it is not one of ours."""
    return next((name for name, form in FORMATS.items() if form.mark in template), None)


def structure(form: str, guide: Guide, tools: Sequence[Tool]) -> str:
    """Return the structural tag that forces what `guide` says, in the format in which the model calls tools. `form` may
    be empty if no tool is offered."""
    calls = [_tag(FORMATS[form], tool) for tool in tools if not guide.call or guide.call == tool.name]
    text = [] if guide.call is not None else [{"type": "json_schema", "json_schema": guide.schema}]
    either = [*calls, *text]
    return json.dumps({
        "type": "structural_tag",
        "format": either[0] if len(either) == 1 else {"type": "or", "elements": either},
    })  # fmt: skip


def beginning(form: str, name: str) -> str:
    """Return the text with which a call of the tool begins; of any tool, if the name is empty. It ends where the model
    would begin another token."""
    begin = FORMATS[form].around[0]
    return begin.replace("NAME", name).rstrip() if name else begin.partition("NAME")[0]


def _tag(form: _Format, tool: Tool) -> dict[str, Any]:
    begin, end = form.around
    content = {"type": "json_schema", "json_schema": tool.parameters, "style": form.style}
    return {"type": "tag", "begin": begin.replace("NAME", tool.name), "content": content, "end": end}


def _how(form: str) -> str:
    return f"A tool is called like this: {FORMATS[form].example}"


def _call(found: Found, id: str) -> ToolCall:
    """Raises Malformed unless it can be sent."""
    name, arguments = found
    if not isinstance(name, str) or not name:
        raise Malformed("the tool call does not name its tool")
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {name:.{SHOWN}} must be a JSON object, not {_shown(arguments)}")
    call = ToolCall(id=id, name=name, arguments=arguments)
    try:
        codec.encode(call)
    except (OverflowError, ValueError, RecursionError) as error:  # numbers beyond 64 bits, half characters
        raise Malformed(f"the arguments of {name:.{SHOWN}} cannot be sent: {error}") from None
    return call


def _shown(value: Any) -> str:
    try:
        return f"{json.dumps(value):.{SHOWN}}"
    except RecursionError:
        return "something that is nested too deeply to be shown"


# --- JSON ---------------------------------------------------------------------------------------------------------


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _json(text: str, start: int) -> tuple[Any, int]:
    """The value at `start`, and where it ends. Raises Malformed, or Cut if more could have made it whole."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        rest = text[start:].rstrip()
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise Cut(f"the tool call has no end: {rest[-SHOWN:]}") from None
        near = text[error.pos : error.pos + 20]
        raise Malformed(f"the tool call is not valid JSON: {error.msg} at {near!r}") from None
    except (ValueError, RecursionError) as error:  # NaN, endless digits, endless brackets
        raise Malformed(f"the tool call is not valid JSON: {error}") from None


def _named(value: Any, *keys: str) -> Found:
    """`keys`: where the arguments may stand."""
    if not isinstance(value, dict):
        raise Malformed(f"a tool call must be a JSON object, not {_shown(value)}")
    key = next((key for key in keys if key in value), None)
    if "name" not in value or key is None:
        raise Malformed(f'a tool call needs "name" and "{keys[0]}"; there are: {_shown(sorted(value))}')
    return value["name"], value[key]


# --- the formats --------------------------------------------------------------------------------------------------


def _blocks(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield the text between the tags; the last block may lack its closing tag, or part of it."""
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        end = text.find(closing, start)
        if end < 0:
            begun = next((n for n in range(len(closing), 0, -1) if text.endswith(closing[:n])), 0)
            yield text[start : max(start, len(text) - begun)]
            return
        yield text[start:end]
        at = text.find(opening, end)


def _hermes(text: str, tools: Sequence[Tool]) -> Iterator[Found]:
    """`<tool_call>{...}</tool_call>`; some models write a list of calls into one block."""
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        value, end = _json(block, 0)
        if block[end:].strip():
            raise Malformed(f"nothing may follow the JSON of a tool call, and {block[end:].strip()!r:.{SHOWN}} does")
        for one in value if isinstance(value, list) else [value]:
            yield _named(one, "arguments")


_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')


def _llama3(text: str, tools: Sequence[Tool]) -> Iterator[Found]:
    """`{"name": ..., "parameters": {...}}` bare in the text, several after one another."""
    at = 0
    marked = text.find("<|python_tag|>")
    if marked >= 0:
        at = marked + len("<|python_tag|>")
        if not _LLAMA_CALL.match(text[at:].lstrip()):
            raise Malformed(f"a tool call must be a JSON object, not {text[at:].strip()!r:.{SHOWN}}")
    while (found := _LLAMA_CALL.search(text, at)) is not None:
        value, at = _json(text, found.start())
        yield _named(value, "parameters", "arguments")


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, tools: Sequence[Tool]) -> Iterator[Found]:
    """`[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name{...}` of the newer models, once per call."""
    for block in text.split("[TOOL_CALLS]")[1:]:
        named = _MISTRAL_NAME.match(block)
        if named is not None:
            yield named[1], _json(block, named.end())[0]
        elif re.fullmatch(r"\s*[\w.-]*\s*", block):
            raise Cut(f"the tool call has no arguments: {block.strip()!r:.{SHOWN}}")
        else:
            value, _ = _json(block, 0)
            for one in value if isinstance(value, list) else [value]:
                yield _named(one, "arguments")


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _qwen3_coder(text: str, tools: Sequence[Tool]) -> Iterator[Found]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        function = _FUNCTION.fullmatch(block)
        if function is None:
            missing = Cut if "</function>" not in block else Malformed
            raise missing(f"a tool call holds one <function=NAME> ... </function>, not {block.strip()!r:.{SHOWN}}")
        name, body = function[1].strip(), function[2]
        types = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
        arguments, at = {}, 0
        while (parameter := _PARAMETER.match(body, at)) is not None:
            key = parameter[1].strip()
            arguments[key] = _typed(parameter[2], types.get(key) if isinstance(types, dict) else None)
            at = parameter.end()
        if body[at:].strip():
            raise Malformed(f"<parameter=KEY> ... </parameter> was expected at {body[at:].strip()!r:.{SHOWN}}")
        yield name, arguments


def _typed(text: str, schema: Any) -> Any:
    """Values come without quotation marks: the schema says whether one is text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text  # of any other kind it is wrong, and who checks the arguments says so


class _Format(msgspec.Struct, frozen=True):
    mark: str
    """In a chat template that teaches it."""
    example: str
    begins: re.Pattern[str]
    """Pattern of the beginning of a call."""
    around: tuple[str, str]
    """Text before and after the arguments of a call; NAME stands for the tool's."""
    find: Callable[[str, Sequence[Tool]], Iterator[Found]]
    style: str = "json"
    """How the arguments are written, as xgrammar names it."""


_OPENING = re.compile("<tool_call>")
FORMATS = {
    "qwen3_coder": _Format(
        "<function=",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        _OPENING,
        ("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>"),
        _qwen3_coder,
        "qwen_xml",
    ),
    "hermes": _Format(
        "<tool_call>",
        '<tool_call>\n{"name": NAME, "arguments": {KEY: VALUE}}\n</tool_call>',
        _OPENING,
        ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        _hermes,
    ),
    "mistral": _Format(
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": NAME, "arguments": {KEY: VALUE}}]',
        re.compile(r"\[TOOL_CALLS\]"),
        ('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
        _mistral,
    ),
    "llama3_json": _Format(
        "ipython",
        '{"name": NAME, "parameters": {KEY: VALUE}}',
        re.compile(rf"<\|python_tag\|>|{_LLAMA_CALL.pattern}"),
        ('{"name": "NAME", "parameters": ', "}"),
        _llama3,
    ),
}
"""By `model.tool_format`, in the order in which they are recognised."""
