"""An answer of the model -> OpenAI's Responses API, whole or as the events of a stream: an item with the text, if there
is any, and an item for each call."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from opentinker.shared.openai.answers import Piece, ReplyText, said, token_logprobs, whole_piece
from opentinker.shared.openai.fields import InvalidField, Json
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.types.core import StopReason, ToolCall

CUT = (StopReason.LENGTH, StopReason.CONTEXT)


def responses_answer(asked: ParsedRequest, answer: ReplyText, mark: str = "") -> Json:
    return _done(_begun(asked, mark), asked, answer, _items(asked, answer))


class ResponsesStream:
    """A ReplyStream of a response."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._asked = asked
        self._response = _begun(asked)
        self._sent = 0
        self._item = ""
        """Id of the item with the text, once it has begun."""
        self._logprobs: list[Json] = []
        self._items: list[Json] = []
        """Whole ones."""

    def begin(self, answer: ReplyText | None = None) -> list[Json]:
        return [self._event(f"response.{kind}", response=self._response) for kind in ("created", "in_progress")]

    def more(self, piece: Piece) -> list[Json]:
        listed = token_logprobs(piece) if self._asked.logprobs else []
        self._logprobs += listed
        return [*self._text_begun(), self._text("response.output_text.delta", delta=piece.text, logprobs=listed)]

    def calls(self, answer: ReplyText) -> list[Json]:
        items = _items(self._asked, answer)
        if not answer.words:
            return [event for item in items for event in self._call(item)]
        self._logprobs = items[0]["content"][0]["logprobs"]
        return [
            *self._text_begun(),
            self._text("response.output_text.delta", delta=answer.words, logprobs=self._logprobs),
            *self._text_done(answer.words, "completed"),
            *(event for item in items[1:] for event in self._call(item)),
        ]

    def end(self, answer: ReplyText) -> list[Json]:
        events = []
        if not answer.tool_calls:
            text = said(self._asked, answer).text
            events = [*self._text_begun(), *self._text_done(text, "incomplete" if answer.stop in CUT else "completed")]
        response = _done(self._response, self._asked, answer, self._items)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: InvalidField) -> list[Json]:
        said = error.body["error"]
        return [self._event("error", code=said["code"], message=said["message"], param=said["param"])]

    def _text_begun(self) -> list[Json]:
        if self._item:
            return []
        self._item = f"msg_{uuid.uuid4().hex}"
        item = {"id": self._item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._text("response.content_part.added", part=_part("", [])),
        ]

    def _text_done(self, text: str, status: str) -> list[Json]:
        part = _part(text, self._logprobs)
        item = {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": [part]}
        self._items.append(item)
        return [
            self._text("response.output_text.done", text=text, logprobs=self._logprobs),
            self._text("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _call(self, item: Json) -> list[Json]:
        place = {"output_index": len(self._items), "item_id": item["id"]}
        self._items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        of_arguments = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item=begun),
            self._event(f"{of_arguments}.delta", **place, delta=item["arguments"]),
            self._event(f"{of_arguments}.done", **place, name=item["name"], arguments=item["arguments"]),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _text(self, kind: str, **more: Any) -> Json:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **more}


def _begun(asked: ParsedRequest, mark: str = "") -> Json:
    """`mark` names the weights, as in a chat."""
    repeated: Json = {
        "instructions": None,
        "metadata": {},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "text": {"format": {"type": "text"}},
        "max_output_tokens": asked.max_tokens,
        "truncation": "disabled",
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "usage": None,
        **repeated,
        **asked.repeated,
    } | ({"system_fingerprint": mark} if mark else {})


def _done(begun: Json, asked: ParsedRequest, answer: ReplyText, items: Sequence[Json]) -> Json:
    cut = answer.stop in CUT and not answer.tool_calls
    prompt, sampled = answer.prompt_tokens, len(answer.ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    return begun | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(items),
        "usage": usage,
    }


def _items(asked: ParsedRequest, answer: ReplyText) -> list[Json]:
    message = said(asked, answer)
    calls = [_call_item(call) for call in message.tool_calls]
    if calls and not message.text:
        return calls
    listed = token_logprobs(whole_piece(asked, answer)) if asked.logprobs else []
    status = "incomplete" if answer.stop in CUT and not calls else "completed"
    item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": status, "role": "assistant"}
    return [{**item, "content": [_part(message.text, listed)]}, *calls]


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(call: ToolCall) -> Json:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": json.dumps(call.arguments),
    }
