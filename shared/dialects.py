"""The dialects in which a model is asked over HTTP: what parses a request, and what writes the answer. All of them come
down to one ParsedRequest and one ReplyText, so that tokens do not depend on the dialect.

Two endpoints speak them: the one that an agent's episode has (envs/agents/endpoint.py), and that of inference jobs
(services/scheduler/inference/inference_api.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import orjson

from opentinker.shared.anthropic.answers import MessagesStream, messages_answer, messages_error
from opentinker.shared.anthropic.requests import parse_messages
from opentinker.shared.openai.answers import (
    AnswerStream,
    ReplyStream,
    ReplyText,
    chat_answer,
    completion_answer,
)
from opentinker.shared.openai.fields import InvalidField, Json
from opentinker.shared.openai.requests import ParsedRequest, parse_chat, parse_completion
from opentinker.shared.openai.responses import parse_responses
from opentinker.shared.openai.responses_answers import ResponsesStream, responses_answer


class Parse(Protocol):
    def __call__(self, body: Json, session: str = "", *, serving: bool = False) -> ParsedRequest: ...


def _openai_error(error: InvalidField) -> Json:
    return error.body


@dataclass(frozen=True, kw_only=True)
class Dialect:
    route: str
    """Below the base URL, which ends in v1."""
    parse: Parse
    answer: Callable[[ParsedRequest, ReplyText, str], Json]
    """The text names the weights, if it is not empty."""
    stream: Callable[[ParsedRequest], ReplyStream]
    error: Callable[[InvalidField], Json] = _openai_error
    last: bytes = b""
    """After the events of a stream."""


OPENAI_END = b"data: [DONE]\n\n"
CHAT = Dialect(
    route="chat/completions", parse=parse_chat, answer=chat_answer, stream=AnswerStream, last=OPENAI_END
)  # fmt: skip
COMPLETIONS = Dialect(
    route="completions",
    parse=parse_completion,
    answer=completion_answer,
    stream=partial(AnswerStream, chat=False),
    last=OPENAI_END,
)
RESPONSES = Dialect(route="responses", parse=parse_responses, answer=responses_answer, stream=ResponsesStream)
MESSAGES = Dialect(
    route="messages", parse=parse_messages, answer=messages_answer, stream=MessagesStream, error=messages_error
)
DIALECTS = {dialect.route: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}


def event(chunk: Json) -> bytes:
    """Return a chunk as a server-sent event; it has a name in the dialects whose chunks have a type."""
    named = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return named + b"data: " + orjson.dumps(chunk) + b"\n\n"
