"""Our nouns -> OpenAI's formats: what an agent is answered, whole or as a stream. Knows no transport."""

from __future__ import annotations

import json
import time
import uuid

from opentinker.envs.agents.wire import Asked, Json
from opentinker.envs.base import Action
from opentinker.shared.types import Message, StopReason, ToolCall

FINISH = {reason: "stop" if reason in (StopReason.EOS, StopReason.STOP) else "length" for reason in StopReason}


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
