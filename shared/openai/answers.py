"""An answer of the model -> OpenAI's chats and completions, whole or as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from opentinker.shared.openai.fields import InvalidField, Json, unknown_model
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.types.core import Message, StopReason, ToolCall

FINISH = {reason: "stop" if reason in (StopReason.EOS, StopReason.STOP) else "length" for reason in StopReason}


TopLogprobs = list[tuple[str, float]]
"""Tokens at one place as text, and their logprobs; the likeliest first."""


class ReplyText(Protocol):
    """A model's answer."""

    @property
    def text(self) -> str: ...
    @property
    def stop(self) -> StopReason: ...
    @property
    def tool_calls(self) -> list[ToolCall]: ...
    @property
    def words(self) -> str:
        """Text before its tool calls."""

    @property
    def ids(self) -> list[int]:
        """Return every sampled token, including the end-of-turn token."""

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of `ids`."""

    @property
    def prompt_tokens(self) -> int: ...


class Piece(msgspec.Struct, frozen=True):
    """New text of an answer, and the tokens that it came from."""

    text: str = ""
    ids: list[int] = []
    logprobs: list[float] = []
    tokens: list[str] = []
    """`ids` as text, if that was asked for."""
    offsets: list[int] = []
    """Where each of them begins in the answer, in characters, if that was asked for."""
    likely: list[TopLogprobs] = []
    """At the place of each of them, if that was asked for."""


class ReplyStream(Protocol):
    """The chunks of one response, in order: `begin`, `more` any number of times or `calls` once, `end`. Or `failed`, at
    any time."""

    def begin(self, answer: ReplyText | None = None) -> list[Json]:
        """`answer`: where it is known already."""

    def more(self, piece: Piece) -> list[Json]: ...

    def calls(self, answer: ReplyText) -> list[Json]:
        """And the words before them, if there are any."""

    def end(self, answer: ReplyText) -> list[Json]: ...

    def failed(self, error: InvalidField) -> list[Json]: ...


def whole_stream(stream: ReplyStream, asked: ParsedRequest, answer: ReplyText) -> list[Json]:
    """Return the chunks of a stream in one piece, where the answer is there as a whole."""
    if answer.tool_calls:
        return [*stream.begin(answer), *stream.calls(answer), *stream.end(answer)]
    return [*stream.begin(answer), *stream.more(whole_piece(asked, answer)), *stream.end(answer)]


def whole_piece(asked: ParsedRequest, answer: ReplyText) -> Piece:
    """The answer as the asker gets it; for the turn of an environment's agent only the token ids are known."""
    text = said(asked, answer).text
    if isinstance(answer, Piece):
        return msgspec.structs.replace(answer, text=text)
    return Piece(text, answer.ids, answer.logprobs)


def said(asked: ParsedRequest, answer: ReplyText) -> Message:
    """The answer as the asker gets it, and as it stands in a request that continues from it."""
    if answer.tool_calls:
        return Message(role="assistant", content=answer.words, tool_calls=answer.tool_calls)
    text = answer.text
    return Message(role="assistant", content=cut(text, asked.stop) if answer.stop == StopReason.STOP else text)


def cut(text: str, stops: Sequence[str]) -> str:
    """Up to the first of the stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class AnswerStream:
    """A ReplyStream of a chat or a completion."""

    def __init__(self, asked: ParsedRequest, *, chat: bool = True) -> None:
        self._asked, self._chat = asked, chat
        self._head = _head(asked, "chat.completion.chunk" if chat else "text_completion", "")

    def begin(self, answer: ReplyText | None = None) -> list[Json]:
        content = None if answer is not None and answer.tool_calls and not answer.words else ""
        return [self._chunk({"role": "assistant", "content": content})] if self._chat else []

    def more(self, piece: Piece) -> list[Json]:
        if not self._chat:
            return [{**self._head, "choices": [_completion(self._asked, piece, None)]}]
        return [self._chunk({"content": piece.text}, _chat_logprobs(self._asked, piece))]

    def calls(self, answer: ReplyText) -> list[Json]:
        words = {"content": answer.words} if answer.words else {}
        listed = [{"index": n, **call} for n, call in enumerate(_calls(answer.tool_calls))]
        logprobs = _chat_logprobs(self._asked, whole_piece(self._asked, answer))
        return [self._chunk({**words, "tool_calls": listed}, logprobs)]

    def end(self, answer: ReplyText) -> list[Json]:
        if self._chat:
            last = self._chunk({}, None, _finish(answer))
        else:
            last = {**self._head, "choices": [_completion(self._asked, Piece(), FINISH[answer.stop])]}
        usage = [{**self._head, "choices": [], "usage": usage_of(answer)}] if self._asked.usage else []
        return [last, *usage]

    def failed(self, error: InvalidField) -> list[Json]:
        return [error.body]

    def _chunk(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice]}


def chat_answer(asked: ParsedRequest, answer: ReplyText, mark: str = "") -> Json:
    """`mark` names the weights."""
    message = said(asked, answer)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _words(message), "refusal": None}
        | ({"tool_calls": _calls(message.tool_calls)} if message.tool_calls else {}),
        "logprobs": _chat_logprobs(asked, whole_piece(asked, answer)),
        "finish_reason": _finish(answer),
    }
    return {**_head(asked, "chat.completion", mark), "choices": [choice], "usage": usage_of(answer)}


def _words(message: Message) -> str | None:
    """Return the text; None if there are only calls."""
    return message.text or (None if message.tool_calls else "")


def completion_answer(asked: ParsedRequest, answer: ReplyText, mark: str = "") -> Json:
    choice = _completion(asked, whole_piece(asked, answer), FINISH[answer.stop])
    return {**_head(asked, "text_completion", mark), "choices": [choice], "usage": usage_of(answer)}


def generate_answer(asked: ParsedRequest, answer: ReplyText) -> Json:
    """Return the answer of `POST /inference/v1/generate`: every sampled token, including the end-of-turn token, with
    its log-probability."""
    choice = {
        "index": 0,
        "token_ids": answer.ids,
        "logprobs": {"content": token_logprobs(whole_piece(asked, answer))},
        "finish_reason": FINISH[answer.stop],
    }
    return {"request_id": f"gen-{uuid.uuid4().hex}", "choices": [choice], "usage": usage_of(answer)}


def models(model: str, context_length: int, *others: str, adapters: Mapping[str, str] | None = None) -> Json:
    """The first is the model's own name; it is known by the others too. `adapters`: their checkpoints, by name."""
    length = {"max_model_len": context_length} if context_length else {}
    cards = [
        {"id": name, "object": "model", "created": 0, "owned_by": "opentinker", **length}
        | ({"root": model} if name != model else {})
        for name in dict.fromkeys([model, *others])
    ]
    cards += [
        {"id": name, "object": "model", "created": 0, "owned_by": "opentinker", **length, "root": root, "parent": model}
        for name, root in (adapters or {}).items()
    ]
    return {"object": "list", "data": cards}


def card_of(listed: Json, name: str) -> Json:
    """One of `models`, by any of its names. Raises Refused."""
    cards: dict[str, Json] = {card["id"]: card for card in listed["data"]}
    if name not in cards:
        raise unknown_model(name, cards)
    return cards[name]


def _head(asked: ParsedRequest, kind: str, mark: str) -> Json:
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": asked.model}
    return head | ({"system_fingerprint": mark} if mark else {})


def usage_of(answer: ReplyText) -> Json:
    prompt, sampled = answer.prompt_tokens, len(answer.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish(answer: ReplyText) -> str:
    return "tool_calls" if answer.tool_calls else FINISH[answer.stop]


def _calls(calls: Sequence[ToolCall]) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls
    ]


def _chat_logprobs(asked: ParsedRequest, piece: Piece) -> Json | None:
    return {"content": token_logprobs(piece), "refusal": None} if asked.logprobs else None


def _names(piece: Piece) -> list[str]:
    """A token whose text is not known is named by its id."""
    return piece.tokens or [f"token_id:{id}" for id in piece.ids]


def token_logprobs(piece: Piece) -> list[Json]:
    return [
        {
            "token": name,
            "logprob": logprob,
            "bytes": _bytes(name) if piece.tokens else None,
            "top_logprobs": [{"token": text, "logprob": of, "bytes": _bytes(text)} for text, of in there],
        }
        for name, logprob, there in zip(
            _names(piece), piece.logprobs, piece.likely or [[]] * len(piece.ids), strict=True
        )
    ]


def _by_text(likely: TopLogprobs) -> dict[str, float]:
    """Return log-probabilities by text; of several tokens with equal text, the likeliest."""
    found: dict[str, float] = {}
    for text, logprob in likely:
        found.setdefault(text, logprob)
    return found


def _bytes(token: str) -> list[int] | None:
    """Return the bytes of a token; None for an incomplete character, whose bytes the text does not determine."""
    return None if "\ufffd" in token else list(token.encode())


def _completion(asked: ParsedRequest, piece: Piece, finish: str | None) -> Json:
    """Offsets that are not known are null. Among the likely tokens of each place is the sampled one, as with OpenAI."""
    names = _names(piece)
    places = piece.offsets if len(piece.offsets) == len(piece.ids) else None
    sampled = zip(piece.likely, names, piece.logprobs, strict=True) if piece.likely else []
    tops = [_by_text([*there, (name, logprob)]) for there, name, logprob in sampled]
    named = {"tokens": names, "token_logprobs": piece.logprobs, "top_logprobs": tops or None, "text_offset": places}
    return {
        "index": 0,
        "text": piece.text,
        "token_ids": piece.ids,
        "logprobs": named if asked.logprobs else None,
        "finish_reason": finish,
    }
