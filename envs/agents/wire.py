"""OpenAI's formats <-> our nouns: what an agent asks, and what it is answered. Knows no transport.

What is asked for and cannot be given is refused. How tokens are sampled is not the agent's to say: temperature, top_p,
seed, penalties and the like are those of the job, whatever a request names, for the logprobs that training needs are
those of the distribution really sampled from.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from opentinker.envs.base import Action
from opentinker.shared import codec
from opentinker.shared.types import Image, Message, StopReason, Text, Tool, ToolCall

Json = dict[str, Any]
MOST_TOP_LOGPROBS = 1
MOST_STOPS = 16
LARGEST_ID = 2**31
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISH = {reason: "stop" if reason in (StopReason.EOS, StopReason.STOP) else "length" for reason in StopReason}
IMAGE_TYPES = ("image/png", "image/jpeg")


class Refused(Exception):
    """The agent's mistake, or a wish that cannot be met: answered as OpenAI's API answers."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = "") -> None:
        self.message, self.status, self.param, self.code = message, status, param, code
        super().__init__(message)

    @property
    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": error}


@dataclass(eq=False, kw_only=True)
class Asked:
    """One request of an agent, on its way to the policy."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    token_ids: list[int] | None = None
    """In place of messages: the whole prompt."""
    text: str | None = None
    """In place of messages: the whole prompt, tokenised as it is."""
    session: str = ""
    """X-Session-ID: prompts of different sessions never continue each other."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    answer: asyncio.Future[Action] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set with the policy's turn, or with Refused."""
    model: str = ""
    stream: bool = False
    usage: bool = False
    """A stream ends with the usage."""
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def gone(self) -> bool:
        """Nobody waits for the answer any more."""
        return self.answer.done()


# --- requests -------------------------------------------------------------------------------------------------------


def parse_chat(body: Json, session: str = "") -> Asked:
    """Of `POST /v1/chat/completions`. Raises Refused."""
    _refuse_unsupported(body)
    messages = _list(body, "messages")
    if not messages:
        raise Refused("there is no message", param="messages")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused('tool_choice can be "auto" or "none" here: nothing forces what is sampled', param="tool_choice")
    tools = [] if choice == "none" else [_tool(tool, f"tools[{n}]") for n, tool in enumerate(_list(body, "tools"))]
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    top = _int(body, "top_logprobs", 0) or 0
    if top > MOST_TOP_LOGPROBS:
        raise Refused("top_logprobs can be 0 or 1 here: the sampled token alone is known", param="top_logprobs")
    asked = Asked(
        messages=[_message(message, f"messages[{n}]") for n, message in enumerate(messages)],
        tools=tools,
        session=session,
        max_tokens=_int(body, limit, 1),
        stop=_stop(body),
        logprobs=_bool(body, "logprobs"),
        top_logprobs=top,
        **_manner(body),
    )
    _check_sendable(asked)
    return asked


def parse_completion(body: Json, session: str = "") -> Asked:
    """Of `POST /v1/completions`: a text or token ids, or a list with one of them. Raises Refused."""
    _refuse_unsupported(body)
    for name in ("echo", "suffix"):
        if body.get(name):
            raise Refused(f"{name} is not supported", param=name)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise Refused("one prompt at a time: ask several times for several answers", param="prompt")
        prompt = prompt[0]
    if prompt == "":
        raise Refused("must not be empty", param="prompt")
    logprobs = _int(body, "logprobs", 0)
    if logprobs is not None and logprobs > MOST_TOP_LOGPROBS:
        raise Refused("logprobs can be 0 or 1 here: the sampled token alone is known", param="logprobs")
    asked = Asked(
        token_ids=None if isinstance(prompt, str) else _token_ids({"prompt": prompt}, "prompt"),
        text=prompt if isinstance(prompt, str) else None,
        session=session,
        max_tokens=_int(body, "max_tokens", 1),
        stop=_stop(body),
        logprobs=logprobs is not None,
        **_manner(body),
    )
    _check_sendable(asked)
    return asked


def parse_generate(body: Json, session: str = "") -> Asked:
    """Of `POST /inference/v1/generate`: tokens in, tokens out. Raises Refused."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refused("must be an object", param="sampling_params")
    _refuse_unsupported(params)
    for name in ("features", "content_parts"):
        if body.get(name):
            raise Refused(f"{name}: images are not supported at the token endpoint", param=name)
    return Asked(
        token_ids=_token_ids(body, "token_ids"),
        session=session,
        max_tokens=_int(params, "max_tokens", 1),
        stop=_stop(params),
        model=_model(body),
    )


def _refuse_unsupported(body: Json) -> None:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise Refused(f"{name} can only be 1: ask several times for several answers", param=name)
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise Refused('response_format can only be {"type": "text"}: nothing forces a format', param="response_format")
    for name in ("functions", "logit_bias", "audio", "prompt_logprobs", "structured_outputs", "guided_json"):
        if body.get(name):
            raise Refused(f"{name} is not supported", param=name)


def _manner(body: Json) -> Json:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("must be an object", param="stream_options")
    return {"model": _model(body), "stream": _bool(body, "stream"), "usage": _bool(options, "include_usage")}


def _model(body: Json) -> str:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused("must be a string", param="model")
    return model or ""


def _list(body: Json, name: str) -> list[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise Refused("must be a list", param=name)
    return value or []


def _int(body: Json, name: str, least: int) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise Refused(f"must be a whole number of at least {least}", param=name)
    return value


def _bool(body: Json, name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise Refused("must be true or false", param=name)
    return bool(value)


def _stop(body: Json) -> list[str]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or any(not isinstance(stop, str) or not stop for stop in stops):
        raise Refused("must be a string or a list of strings", param="stop")
    if len(stops) > MOST_STOPS:
        raise Refused(f"can have {MOST_STOPS} strings at most", param="stop")
    return stops


def _token_ids(body: Json, name: str) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not ids or any(type(id) is not int or not 0 <= id < LARGEST_ID for id in ids):
        raise Refused("must be a list of token ids, at least one", param=name)
    return ids


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise Refused(f"must be an object with one of the roles {', '.join(ROLES)}", param=where)
    return Message(
        role=ROLES[given["role"]],
        content=_content(given.get("content"), f"{where}.content"),
        tool_calls=[_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(_list(given, "tool_calls"))],
        tool_call_id=_text(given, "tool_call_id", where),
        name=_text(given, "name", where),
    )


def _text(given: Json, name: str, where: str) -> str:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused("must be a string", param=f"{where}.{name}")
    return value or ""


def _content(given: Any, where: str) -> str | list[Text | Image]:
    """Parts that are all text are one text."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise Refused("must be a string or a list of parts", param=where)
    parts = [_part(part, f"{where}[{n}]") for n, part in enumerate(given)]
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "".join(texts) if len(texts) == len(parts) else parts


def _part(given: Any, where: str) -> Text | Image:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text" and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind == "image_url" and isinstance(given.get("image_url"), dict):
        head, _, data = str(given["image_url"].get("url")).partition(";base64,")
        media_type = head.removeprefix("data:")
        if media_type not in IMAGE_TYPES:
            raise Refused("images are taken as data:image/png;base64,... or image/jpeg", param=where)
        try:
            return Image(base64.b64decode(data, validate=True), media_type)
        except binascii.Error as error:
            raise Refused(f"the image is not valid base64: {error}", param=where) from None
    raise Refused("parts of type text and image_url are understood", param=where)


def _call(given: Any, where: str) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("must be a call of a function, with its name", param=where)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError) as error:
        raise Refused(f"is not JSON: {error}", param=f"{where}.function.arguments") from None
    if not isinstance(arguments, dict):
        raise Refused("must be a JSON object", param=f"{where}.function.arguments")
    return ToolCall(id=_text(given, "id", where), name=function["name"], arguments=arguments)


def _tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("must be a function, with its name", param=where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise Refused("must be a JSON schema", param=f"{where}.function.parameters")
    return Tool(name=function["name"], description=_text(function, "description", where), parameters=parameters)


def _check_sendable(asked: Asked) -> None:
    """JSON knows numbers and half characters that cannot travel."""
    try:
        codec.encode([asked.messages, asked.tools, asked.text])
    except (OverflowError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise Refused(f"cannot be sent: {error}", param="messages" if asked.text is None else "prompt") from None


# --- answers --------------------------------------------------------------------------------------------------------


def said(asked: Asked, action: Action) -> Message:
    """The answer as the agent gets it, and as it stands in a request that continues from it."""
    if action.tool_calls:
        return Message(role="assistant", content=action.words, tool_calls=action.tool_calls)
    text = action.text
    if action.stop == StopReason.STOP:
        text = next((text.removesuffix(stop) for stop in asked.stop if text.endswith(stop)), text)
    return Message(role="assistant", content=text)


def chat_answer(asked: Asked, action: Action) -> Json:
    message = said(asked, action)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _words(message), "refusal": None}
        | ({"tool_calls": _calls(message.tool_calls)} if message.tool_calls else {}),
        "logprobs": _chat_logprobs(asked, action),
        "finish_reason": _finish(action),
    }
    return {**_head(asked, "chat.completion"), "choices": [choice], "usage": _usage(action)}


def _words(message: Message) -> str | None:
    """None where there are calls alone."""
    return message.text or (None if message.tool_calls else "")


def chat_chunks(asked: Asked, action: Action) -> list[Json]:
    """The same as a stream. The policy's turn is there as a whole, so it comes in one piece."""
    head = _head(asked, "chat.completion.chunk")
    message = said(asked, action)
    content: Json = {"content": message.text} if message.text or not message.tool_calls else {}
    if message.tool_calls:
        content["tool_calls"] = [{"index": n, **call} for n, call in enumerate(_calls(message.tool_calls))]
    deltas: list[tuple[Json, Json | None, str | None]] = [
        ({"role": "assistant", "content": None if _words(message) is None else ""}, None, None),
        (content, _chat_logprobs(asked, action), None),
        ({}, None, _finish(action)),
    ]
    chunks: list[Json] = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}
        for delta, logprobs, finish in deltas
    ]
    return chunks + _last_chunk(head, asked, action)


def completion_answer(asked: Asked, action: Action) -> Json:
    return {**_head(asked, "text_completion"), "choices": [_completion(asked, action)], "usage": _usage(action)}


def completion_chunks(asked: Asked, action: Action) -> list[Json]:
    head = _head(asked, "text_completion")
    return [{**head, "choices": [_completion(asked, action)]}, *_last_chunk(head, asked, action)]


def generate_answer(asked: Asked, action: Action) -> Json:
    """Every sampled token, the end-of-turn token included, and a logprob for each."""
    choice = {
        "index": 0,
        "token_ids": action.ids,
        "logprobs": {"content": _token_logprobs(action, top=0)},
        "finish_reason": FINISH[action.stop],
    }
    return {"request_id": f"gen-{uuid.uuid4().hex}", "choices": [choice], "usage": _usage(action)}


def models(model: str, context_length: int) -> Json:
    card: Json = {"id": model, "object": "model", "created": 0, "owned_by": "opentinker"}
    return {"object": "list", "data": [card | ({"max_model_len": context_length} if context_length else {})]}


def _head(asked: Asked, kind: str) -> Json:
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": asked.model}


def _last_chunk(head: Json, asked: Asked, action: Action) -> list[Json]:
    return [{**head, "choices": [], "usage": _usage(action)}] if asked.usage else []


def _usage(action: Action) -> Json:
    prompt, sampled = action.prompt_tokens, len(action.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish(action: Action) -> str:
    return "tool_calls" if action.tool_calls else FINISH[action.stop]


def _calls(calls: list[ToolCall]) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls
    ]


def _chat_logprobs(asked: Asked, action: Action) -> Json | None:
    return {"content": _token_logprobs(action, asked.top_logprobs), "refusal": None} if asked.logprobs else None


def _token_logprobs(action: Action, top: int) -> list[Json]:
    """A token is named by its id: what it is as text, only the engine's side knows."""
    listed = [
        {"token": f"token_id:{id}", "logprob": logprob, "bytes": None}
        for id, logprob in zip(action.ids, action.logprobs, strict=True)
    ]
    return [{**token, "top_logprobs": [token] if top else []} for token in listed]


def _completion(asked: Asked, action: Action) -> Json:
    tokens = [f"token_id:{id}" for id in action.ids]
    logprobs = {"tokens": tokens, "token_logprobs": action.logprobs, "top_logprobs": None, "text_offset": []}
    return {
        "index": 0,
        "text": said(asked, action).text,
        "token_ids": action.ids,
        "logprobs": logprobs if asked.logprobs else None,
        "finish_reason": FINISH[action.stop],
    }
