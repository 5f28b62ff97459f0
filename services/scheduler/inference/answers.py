"""Answers of an inference job on their way to the client: chunks of a stream, and several answers to one request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.event_stream import event_stream
from opentinker.shared import dialects
from opentinker.shared.asyncio_tools import gather_all
from opentinker.shared.dialects import Dialect
from opentinker.shared.openai.answers import Piece, ReplyStream, said, usage_of
from opentinker.shared.openai.choices import joined, renumbered, total
from opentinker.shared.openai.fields import InvalidField, Json
from opentinker.shared.openai.inference import GenerateChunk, GenerateRequest, GenerateResult
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.openai.sampling import MAX_SEED

Pieces = AsyncGenerator[GenerateChunk, None]


async def write(response: web.StreamResponse, chunks: Sequence[Json]) -> None:
    for chunk in chunks:
        await response.write(dialects.event(chunk))


async def reply_of(answer: Pieces) -> GenerateResult:
    """Raises InvalidField."""
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            if piece.reply is not None:
                return piece.reply
    raise AssertionError("an answer ends with a reply")


async def chunks_of(
    answer: Pieces, stream: ReplyStream, asked: ParsedRequest, ended: Callable[[GenerateResult], None]
) -> AsyncGenerator[list[Json], None]:
    """Yield the chunks of a stream as the answer comes. `ended` is given the whole answer. Raises InvalidField."""
    begun, sent, counted = False, 0, 0
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            if not begun:
                begun = True
                yield stream.begin(piece.reply)
            if piece.reply is not None:
                ended(piece.reply)
                yield _rest(stream, asked, piece.reply, sent, counted)
            else:
                yield stream.more(piece)
                sent, counted = sent + len(piece.text), counted + len(piece.ids)


def _rest(stream: ReplyStream, asked: ParsedRequest, reply: GenerateResult, sent: int, counted: int) -> list[Json]:
    """Return chunks for the unsent part of the result: characters from `sent`, tokens from `counted`."""
    if reply.tool_calls:
        return [*stream.calls(reply), *stream.end(reply)]
    text, ids = said(asked, reply).text[sent:], reply.ids[counted:]
    if not text and not ids:
        return stream.end(reply)
    numbers = reply.logprobs[counted:], reply.tokens[counted:], reply.offsets[counted:], reply.likely
    return [*stream.more(Piece(text, ids, *numbers)), *stream.end(reply)]


def each_answer(ask: GenerateRequest, asked: ParsedRequest) -> list[GenerateRequest]:
    """Return a request for each answer that is asked for: those to the first prompt, those to the second... Answers to
    one prompt have different seeds."""
    found: list[GenerateRequest] = []
    prompts: list[str | list[int] | None] = [*asked.prompts] or [None]
    for prompt in prompts:
        for n in range(asked.count):
            seed = None if ask.manner.seed is None else (ask.manner.seed + n) % (MAX_SEED + 1)
            changes: Json = {"id": f"{ask.id}-{len(found)}", "manner": msgspec.structs.replace(ask.manner, seed=seed)}
            if prompt is not None:
                text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
                changes |= {"text": text, "token_ids": ids}
            found.append(msgspec.structs.replace(ask, **changes))
    return found


class Answers:
    """Answers of one request, sampled side by side. If one fails, so does the request, and the others are cancelled."""

    def __init__(
        self, answer: Callable[[GenerateRequest], Pieces], asked: ParsedRequest, ask: GenerateRequest, dialect: Dialect
    ) -> None:
        self._answer, self._asked, self._asks, self._dialect = answer, asked, each_answer(ask, asked), dialect

    async def whole(self) -> web.StreamResponse:
        """Raises InvalidField."""
        replies = await gather_all([reply_of(self._answer(ask)) for ask in self._asks])
        found = [self._dialect.answer(self._asked, reply, f"weights-{reply.version}") for reply in replies]
        return json_response(joined(found, self._asked.count) if len(found) > 1 else found[0])

    async def streamed(self, request: web.Request) -> web.StreamResponse:
        """Write chunks as they come. Errors before the first are a status; later ones are an event, the last one."""
        response, preparing, several = event_stream(), asyncio.Lock(), len(self._asks) > 1
        alone = msgspec.structs.replace(self._asked, usage=self._asked.usage and not several)
        streams = [self._dialect.stream(alone) for _ in self._asks]
        head: Json = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time())}

        async def send(index: int, ask: GenerateRequest) -> GenerateResult:
            ends: list[GenerateResult] = []
            async for chunks in chunks_of(self._answer(ask), streams[index], alone, ends.append):
                async with preparing:
                    if not response.prepared:
                        await response.prepare(request)
                await write(response, renumbered(chunks, index, head) if several else chunks)
            return ends[0]

        try:
            replies = await gather_all([send(index, ask) for index, ask in enumerate(self._asks)])
            if several and self._asked.usage:
                (last,) = self._dialect.stream(self._asked).end(replies[0])[1:]
                usage = total([usage_of(reply) for reply in replies], self._asked.count)
                await write(response, [{**last, **head, "usage": usage}])
            await response.write(self._dialect.last)
        except InvalidField as refused:
            if not response.prepared:
                raise
            await write(response, streams[0].failed(refused))
        await response.write_eof()
        return response
