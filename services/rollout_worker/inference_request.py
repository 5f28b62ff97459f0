"""One request to an inference job: its progress, and its tokens on their way to the client."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec

from opentinker.services.rollout_worker.engines.base import Completion, Likely, Sampling
from opentinker.shared.messaging.streaming import Send
from opentinker.shared.openai.inference import GenerateChunk, GenerateRequest


def sampling_of(ask: GenerateRequest, room: int, adapter: str, structure: str) -> Sampling:
    """`room`: tokens that the prompt leaves of the context; `adapter` and `structure` as in Sampling."""
    return Sampling(
        **msgspec.structs.asdict(ask.manner),
        max_tokens=room if ask.max_tokens is None else min(ask.max_tokens, room),
        stop=ask.stop,
        adapter=adapter,
        structure=structure,
        likely=ask.likely,
    )


class RequestState:
    """One request and its progress."""

    def __init__(self, ask: GenerateRequest, send: Send[GenerateChunk]) -> None:
        self.ask, self._send = ask, send
        self._seq = 0
        self.spoke_at = time.monotonic()
        self.abandoned = False
        self.told = 0
        """Tokens that came with pieces."""

    async def say(self, **parts: object) -> None:
        piece = GenerateChunk(seq=self._seq, **parts)  # type: ignore[arg-type]
        self._seq += 1
        self.spoke_at = time.monotonic()
        try:
            await self._send(piece)
        except Exception:  # the chunk was not sent, and the next one must not leave a gap
            self._seq -= 1
            raise
        self.told += len(piece.ids)


class TokenChunk(NamedTuple):
    """Some tokens in a row."""

    ids: list[int]
    logprobs: list[float]
    likely: list[Likely]
    """Empty unless asked for."""


class TokenQueue:
    """Tokens on their way from the engine to a streaming client."""

    def __init__(self) -> None:
        self._found = TokenChunk([], [], [])
        self._there = asyncio.Event()

    def add(self, ids: list[int], logprobs: list[float], likely: list[Likely]) -> None:
        self._found = TokenChunk(self._found.ids + ids, self._found.logprobs + logprobs, self._found.likely + likely)
        self._there.set()

    async def more(self, generating: asyncio.Task[Completion]) -> TokenChunk:
        """Return new tokens; none when generation has ended."""
        waiting = asyncio.ensure_future(self._there.wait())
        try:
            await asyncio.wait([waiting, generating], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self._there.clear()
        found, self._found = self._found, TokenChunk([], [], [])
        return found
