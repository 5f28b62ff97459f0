"""An answer of the model -> Anthropic's Messages API, whole or as the events of a stream; and its errors."""

from __future__ import annotations

import json
import uuid

from opentinker.shared.openai.answers import Piece, ReplyText, said
from opentinker.shared.openai.fields import InvalidField, Json
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.types.core import Message, StopReason

ENDS = {
    StopReason.EOS: "end_turn",
    StopReason.STOP: "stop_sequence",
    StopReason.LENGTH: "max_tokens",
    StopReason.CONTEXT: "model_context_window_exceeded",
}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; other mistakes are `invalid_request_error`, other faults `api_error`."""


def messages_answer(asked: ParsedRequest, answer: ReplyText, mark: str = "") -> Json:
    usage = _usage(answer.prompt_tokens, len(answer.ids))
    return {
        **_begun(asked, mark),
        "content": _blocks(said(asked, answer)),
        **_end(asked, answer),
        "usage": usage,
    }


def messages_error(error: InvalidField) -> Json:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


class MessagesStream:
    """A ReplyStream of a message."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._asked = asked
        self._message = _begun(asked)
        self._open = False
        """A block of text has begun."""

    def begin(self, answer: ReplyText | None = None) -> list[Json]:
        usage = _usage(answer.prompt_tokens if answer is not None else 0, 0)
        message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def more(self, piece: Piece) -> list[Json]:
        begun = [] if self._open else [_block_start(0, {"type": "text", "text": ""})]
        self._open = True
        return [*begun, _delta(0, {"type": "text_delta", "text": piece.text})]

    def calls(self, answer: ReplyText) -> list[Json]:
        events = []
        for n, block in enumerate(_blocks(said(self._asked, answer))):
            if block["type"] == "text":
                begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                begun = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [_block_start(n, begun), _delta(n, delta), _block_stop(n)]
        return events

    def end(self, answer: ReplyText) -> list[Json]:
        text = [] if answer.tool_calls else [*([] if self._open else self.more(Piece())), _block_stop(0)]
        usage = _usage(answer.prompt_tokens, len(answer.ids))
        last = {"type": "message_delta", "delta": _end(self._asked, answer), "usage": usage}
        return [*text, last, {"type": "message_stop"}]

    def failed(self, error: InvalidField) -> list[Json]:
        return [messages_error(error)]


def _begun(asked: ParsedRequest, mark: str = "") -> Json:
    """`mark` names the weights, as in a chat."""
    named = {"system_fingerprint": mark} if mark else {}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": asked.model, **named}


def _blocks(message: Message) -> list[Json]:
    """A block of text, which may be empty if it is the only one, and a block for each call."""
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in message.tool_calls
    ]
    return [*([{"type": "text", "text": message.text}] if message.text or not calls else []), *calls]


def _end(asked: ParsedRequest, answer: ReplyText) -> Json:
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = [(at, stop) for stop in asked.stop if (at := answer.text.find(stop)) >= 0]
    sequence = min(found)[1] if found and answer.stop == StopReason.STOP else None
    return {"stop_reason": ENDS[answer.stop], "stop_sequence": sequence}


def _usage(prompt: int, sampled: int) -> Json:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": sampled, **cache}


def _block_start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block_stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}
