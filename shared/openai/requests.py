"""Requests -> Asked. What is asked for and cannot be given is refused.

Sampling options are not parsed here: an agent's requests leave them to the job, because training needs
log-probabilities under the distribution that was really used; requests to inference jobs bring their options
(sampling.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from opentinker.shared.openai.fields import InvalidField, Json, flag, items, stops, table, text, token_ids, whole
from opentinker.shared.openai.guides import guide_of, is_told_of_tools, schema_of
from opentinker.shared.types import codec
from opentinker.shared.types.core import Image, Message, Text, Tool, ToolCall
from opentinker.shared.types.guide import Guide

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
IMAGE_TYPES = ("image/png", "image/jpeg")
MAX_LIKELY_CHAT, MAX_LIKELY = 20, 5
"""Tokens at each place whose logprobs a chat and a completion can ask for: OpenAI's limits."""
MAX_ANSWERS = 64
"""Limit of the answers of one request, to all its prompts."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request, as messages, text or token ids, and its limits."""

    messages: list[Message] = []
    tools: list[Tool] = []
    guide: Guide | None = None
    """Constraint on the answer; None: anything."""
    token_ids: list[int] | None = None
    """In place of messages: the whole prompt."""
    text: str | None = None
    """In place of messages: the whole prompt, tokenised as it is."""
    max_tokens: int | None = None
    """None: the room in the context."""
    stop: list[str] = []
    stream: bool = False
    """The answer is wanted while it is sampled; one that may call tools comes as a whole all the same."""
    likely: int = 0
    """Number of likeliest tokens to return at each place."""


class ParsedRequest(Question, frozen=True, kw_only=True, eq=False):
    """A parsed request to a model."""

    session: str = ""
    """X-Session-ID: prompts of different sessions never continue each other."""
    model: str = ""
    usage: bool = False
    """A stream ends with the usage."""
    logprobs: bool = False
    """Return log-probabilities of the sampled tokens."""
    prompts: list[str | list[int]] = []
    """All prompts of a completion, of which the first is `text` or `token_ids`."""
    count: int = 1
    """Number of answers to each prompt."""
    repeated: Json = {}
    """Fields of the request that its answer repeats."""


def parse_chat(body: Json, session: str = "", *, serving: bool = False) -> ParsedRequest:
    """Parse `POST /v1/chat/completions`. `serving`: for an inference job, which trains nothing: likeliest tokens and
    several answers may be asked for. Raises InvalidField."""
    refuse_unsupported(body)
    messages = items(body, "messages")
    if not messages:
        raise InvalidField("there is no message", param="messages")
    tools = tools_of(body, _chat_tool)
    top, logprobs = most_likely(body, "top_logprobs", MAX_LIKELY_CHAT, serving), flag(body, "logprobs")
    if top is not None and not logprobs:
        raise InvalidField("top_logprobs needs logprobs = true", param="top_logprobs")
    asked = ParsedRequest(
        messages=[_message(message, f"messages[{n}]") for n, message in enumerate(messages)],
        tools=tools,
        guide=guide_of(body, body.get("response_format"), "response_format", tools),
        count=_count(body, serving),
        session=session,
        max_tokens=_most_tokens(body),
        stop=stops(body),
        logprobs=logprobs,
        likely=top or 0,
        **_stream_options(body),
    )
    check_sendable(asked, "messages")
    return asked


def parse_completion(body: Json, session: str = "", *, serving: bool = False) -> ParsedRequest:
    """Parse `POST /v1/completions`: a text or token ids, or a list of them. `serving` as above. Raises
    InvalidField."""
    refuse_unsupported(body)
    refuse_set(body, "echo", "suffix")
    _refuse_format(body)
    given = body.get("prompt")
    prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(prompts) > 1 and not serving:
        raise InvalidField("one prompt at a time: ask several times for several answers", param="prompt")
    count = _count(body, serving, len(prompts))
    parsed = [_prompt(prompt) for prompt in prompts]
    logprobs = most_likely(body, "logprobs", MAX_LIKELY, serving)
    asked = ParsedRequest(
        token_ids=None if isinstance(parsed[0], str) else parsed[0],
        text=parsed[0] if isinstance(parsed[0], str) else None,
        prompts=parsed,
        count=count,
        session=session,
        max_tokens=whole(body, "max_tokens", 1),
        stop=stops(body),
        logprobs=logprobs is not None,
        likely=logprobs or 0,
        **_stream_options(body),
    )
    check_sendable(asked, "prompt")
    return asked


def _prompt(given: Any) -> str | list[int]:
    if given == "":
        raise InvalidField("must not be empty", param="prompt")
    return given if isinstance(given, str) else token_ids({"prompt": given}, "prompt")


def _count(body: Json, serving: bool, prompts: int = 1) -> int:
    """Return the number of answers to each prompt."""
    count = whole(body, "n", 1) or 1
    if count > 1 and not serving:
        raise InvalidField("n can only be 1: ask several times for several answers", param="n")
    if count * prompts > MAX_ANSWERS:
        raise InvalidField(
            f"{count * prompts} answers at once; at most {MAX_ANSWERS} are given", param="n" if count > 1 else "prompt"
        )
    return count


def _refuse_format(body: Json) -> None:
    if schema_of(body.get("response_format"), "response_format") is not None:
        raise InvalidField("response_format is for chats: a plain prompt has none", param="response_format")


def parse_generate(body: Json, session: str = "") -> ParsedRequest:
    """Parse `POST /inference/v1/generate`: tokens in, tokens out. Raises InvalidField."""
    params = table(body, "sampling_params")
    refuse_unsupported(params)
    _count(params, serving=False)
    _refuse_format(params)
    for name in ("features", "content_parts"):
        if body.get(name):
            raise InvalidField(f"{name}: images are not supported at the token endpoint", param=name)
    return ParsedRequest(
        token_ids=token_ids(body, "token_ids"),
        session=session,
        max_tokens=whole(params, "max_tokens", 1),
        stop=stops(params),
        model=model_of(body),
    )


def most_likely(body: Json, name: str, most: int, known: bool) -> int | None:
    found = whole(body, name, 0)
    if found and not known:
        raise InvalidField(f"{name} can only be 0: the logprob of the sampled token alone is known", param=name)
    if found is not None and found > most:
        raise InvalidField(f"{name} can be {most} at most", param=name)
    return found


def _most_tokens(body: Json) -> int | None:
    """Return the token limit of a chat, under its newer or older name."""
    newer, older = whole(body, "max_completion_tokens", 1), whole(body, "max_tokens", 1)
    if None not in (newer, older) and newer != older:
        raise InvalidField(
            f"max_completion_tokens is {newer} and max_tokens is {older}: both name one limit, give one of them",
            param="max_tokens",
        )
    return older if newer is None else newer


def refuse_unsupported(body: Json) -> None:
    if body.get("best_of") not in (None, 1):
        raise InvalidField("best_of can only be 1: ask for several answers with n", param="best_of")
    refuse_set(body, "functions", "logit_bias", "audio", "prompt_logprobs", "structured_outputs", "guided_json")


def refuse_set(body: Json, *names: str) -> None:
    for name in names:
        if body.get(name):
            raise InvalidField(f"{name} is not supported", param=name)


def tools_of(body: Json, tool: Callable[[Any, str], Tool]) -> list[Tool]:
    """Return the tools that the model sees. `tool` parses one of them, by its place."""
    tools = [tool(given, f"tools[{n}]") for n, given in enumerate(items(body, "tools"))]
    return tools if is_told_of_tools(body) else []


def _stream_options(body: Json) -> Json:
    options = table(body, "stream_options")
    for name in sorted(options.keys() - {"include_usage"}):
        if options[name] not in (None, False):
            raise InvalidField(f"stream_options.{name} is not supported", param="stream_options")
    return {"model": model_of(body), "stream": flag(body, "stream"), "usage": flag(options, "include_usage")}


def model_of(body: Json) -> str:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidField("must be a string", param="model")
    return model or ""


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise InvalidField(f"must be an object with one of the roles {', '.join(ROLES)}", param=where)
    return Message(
        role=ROLES[given["role"]],
        content=content_of(given.get("content"), f"{where}.content", _part),
        tool_calls=[_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(items(given, "tool_calls"))],
        tool_call_id=text(given, "tool_call_id", where),
        name=text(given, "name", where),
    )


def content_of(
    given: Any, where: str, part: Callable[[Any, str], Text | Image], *, called: str = "parts"
) -> str | list[Text | Image]:
    """Return a text, or a list of parts. `part` parses one of them, by its place."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise InvalidField(f"must be a string or a list of {called}", param=where)
    return joined([part(one, f"{where}[{n}]") for n, one in enumerate(given)])


def joined(parts: Sequence[Text | Image]) -> str | list[Text | Image]:
    """Parts that are all text are one text."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "".join(texts) if len(texts) == len(parts) else list(parts)


def _part(given: Any, where: str) -> Text | Image:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text" and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind == "image_url" and isinstance(given.get("image_url"), dict):
        return image_in_url(given["image_url"].get("url"), where)
    raise InvalidField("parts of type text and image_url are understood", param=where)


def image_in_url(url: Any, where: str) -> Image:
    head, _, data = str(url).partition(";base64,")
    return image_of(head.removeprefix("data:"), data, where)


def image_of(media_type: Any, data: Any, where: str) -> Image:
    if media_type not in IMAGE_TYPES or not isinstance(data, str):
        raise InvalidField("images are taken as data:image/png;base64,... or image/jpeg", param=where)
    try:
        return Image(base64.b64decode(data, validate=True), media_type)
    except ValueError as error:  # binascii.Error, and signs beyond ASCII
        raise InvalidField(f"the image is not valid base64: {error}", param=where) from None


def _call(given: Any, where: str) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise InvalidField("must be a call of a function, with its name", param=where)
    return call_of(function, text(given, "id", where), f"{where}.function")


def call_of(function: Json, id: str, where: str) -> ToolCall:
    """`function`: an object with `name` and, as JSON text, `arguments`."""
    if not isinstance(function.get("name"), str):
        raise InvalidField("must be a call of a function, with its name", param=where)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(f"is not JSON: {error}", param=f"{where}.arguments") from None
    if not isinstance(arguments, dict):
        raise InvalidField("must be a JSON object", param=f"{where}.arguments")
    return ToolCall(id=id, name=function["name"], arguments=arguments)


def _chat_tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    return tool_of(function, "parameters", where, f"{where}.function")


def tool_of(function: Any, schema: str, where: str, inside: str) -> Tool:
    """`function`: an object with `name`, `description` and the schema of its arguments, under that name."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidField("must be a function, with its name", param=where)
    parameters = function.get(schema) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidField("must be a JSON schema", param=f"{inside}.{schema}")
    return Tool(name=function["name"], description=text(function, "description", inside), parameters=parameters)


def check_sendable(asked: ParsedRequest, param: str) -> None:
    """JSON knows numbers and half characters that cannot travel. `param`: where the prompt stands."""
    try:
        codec.encode([asked.messages, asked.tools, asked.text, asked.stop])
    except (OverflowError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidField(f"cannot be sent: {error}", param=param) from None
