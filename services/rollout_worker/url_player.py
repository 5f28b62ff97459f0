"""A seat's player behind a URL: a model of an OpenAI-compatible server, asked over chat completions.

    ask      consumes the conversation      produces words      waits for the server, and for a free connection

The server is not trusted: the connection is guarded (`shared/security/egress.py`), redirects are not followed, and
bytes, time and tries are bounded. A key is sent to its URL alone, and removed from the server's answers. The answers
are counted in tokens of the job's first policy, so that matches have the same form for all players: they are not
trained on.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
import orjson

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.renderer import MAX_IMAGES, Renderer
from opentinker.shared.backoff import Backoff
from opentinker.shared.security.egress import EgressRefused
from opentinker.shared.security.redact import HIDDEN
from opentinker.shared.spec import SeatSpec
from opentinker.shared.types import codec
from opentinker.shared.types.core import Image, Message, StopReason, WeightVersion
from opentinker.shared.types.env_protocol import SeatPrompt
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.trajectories import Span

TRIES = 3
ANSWER_BYTES = 1024**2
WORDS_CHARACTERS = 65_536
MAX_QUOTED = 200
"""Characters of an answer that an error quotes."""
CONNECT_S = 10.0
BUSY = (408, 409, 425, 429)
"""Statuses below 500 of requests that may succeed later."""
NO_VERSION = WeightVersion(0, 0)
"""Nothing is known of the weights behind a URL."""
ROLES = ("system", "user", "assistant")


class UrlFailed(OpenTinkerError):
    """The model gave no answer that can be used."""


class _TryAgain(Exception):
    """This try failed; another may not."""


class _Words(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Words
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_Choice]


class UrlTurn(NamedTuple):
    words: str
    completion: Completion
    """The words in tokens that the policy could have read, for people to look at."""


class UrlPlayer:
    """`http`: a guarded session, which the caller closes. `renderer`, `context`: those of the job's first policy.
    `backoff_s`: first and longest pause between tries."""

    def __init__(
        self,
        seat: SeatSpec,
        secret: str,
        http: aiohttp.ClientSession,
        renderer: Renderer,
        context: int,
        backoff_s: tuple[float, float] = (0.5, 8.0),
    ) -> None:
        assert seat.player is not None and seat.timeout_s is not None and seat.concurrency is not None
        self.name = seat.player
        self.renderer, self.context = renderer, context
        self._seat, self._secret, self._http, self._backoff_s = seat, secret, http, backoff_s
        self._timeout_s, self._end = seat.timeout_s, min(renderer.eos_ids)
        self._places = asyncio.Semaphore(seat.concurrency)
        """Waiting here has no time limit but the episode's."""

    def observe(self, prompt: SeatPrompt) -> list[int]:
        """Return what the seat is shown next, in tokens. Raises UrlFailed if only a model with tokens could see it."""
        if (prompt.prompt_ids, prompt.prompt_text) != (None, None):
            raise UrlFailed(f"{self.name} takes messages, and the environment shows tokens or plain text")
        if prompt.tools:
            raise UrlFailed(f"{self.name} is offered tools, which a seat with a url cannot call")
        if sum(len(message.images) for message in prompt.messages) > MAX_IMAGES:
            raise UrlFailed(f"{self.name} is shown more than {MAX_IMAGES} images at once")
        ids = [token for message in prompt.messages for token in self.renderer.plain(message.text, first=False)]
        return ids if ids or not prompt.messages else [self._end]

    async def ask(self, said: Sequence[Message], prompt: SeatPrompt, stop: Sequence[str]) -> UrlTurn:
        """Return the next turn of the seat in the conversation. Raises UrlFailed after TRIES tries."""
        body = self._body(said, prompt.max_tokens)
        backoff = Backoff(*self._backoff_s)
        for left in range(TRIES - 1, -1, -1):
            try:
                async with self._places:
                    answer = await self._once(body)
                return self._turn(answer, [*stop, *prompt.stop])
            except _TryAgain as error:
                if left == 0:
                    raise UrlFailed(self._hidden(f"{self.name}: {error} ({TRIES} tries)")) from None
            await backoff.sleep()
        raise AssertionError("unreachable")

    def _body(self, said: Sequence[Message], limit: int | None) -> bytes:
        tokens, field = self._seat.answer_tokens, self._seat.tokens_field
        assert tokens is not None and field is not None
        body: dict[str, Any] = {
            "model": self._seat.model,
            "messages": [_as_sent(message) for message in said],
            field: tokens if limit is None else min(tokens, limit),
            "stream": False,
        }
        if self._seat.temperature is not None:
            body["temperature"] = self._seat.temperature
        return orjson.dumps(body)

    async def _once(self, body: bytes) -> _Choice:
        """Raises _TryAgain, UrlFailed."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        try:
            async with self._http.post(
                f"{self._seat.url}/chat/completions",
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_S),
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise UrlFailed(f"{self.name} answered in an encoding that was not asked for")
                return self._choice(response, await _read_limited(response))
        except TimeoutError:  # some are errors of aiohttp too
            raise _TryAgain(f"no answer in time (timeout_s = {self._timeout_s:g} of its seat)") from None
        except (aiohttp.ClientError, OSError) as error:
            refused = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            if isinstance(refused, EgressRefused):
                raise UrlFailed(f"{self.name}: {refused}") from None
            raise _TryAgain(str(error) or repr(error)) from None

    def _choice(self, response: aiohttp.ClientResponse, raw: bytes) -> _Choice:
        if response.status >= 500 or response.status in BUSY:
            raise _TryAgain(f"answered {response.status}: {self._quoted(raw)}")
        if 300 <= response.status < 400:
            where = self._hidden(response.headers.get("Location", "nowhere"))[:MAX_QUOTED]
            problem = f"answered {response.status}, a redirect to {where}, which is not followed: name that URL itself"
            raise UrlFailed(f"{self.name} {problem}")
        if response.status != 200:
            raise UrlFailed(f"{self.name} answered {response.status}: {self._quoted(raw)}")
        try:
            choice = codec.from_json(_ChatAnswer, raw).choices[0]
        except (codec.WireError, IndexError):
            raise _TryAgain(f"did not answer with a chat completion: {self._quoted(raw)}") from None
        if choice.message.content is None:
            raise _TryAgain(f"said nothing: {self._quoted(raw)}")
        return choice

    def _turn(self, choice: _Choice, stop: Sequence[str]) -> UrlTurn:
        """Raises _TryAgain."""
        words = self._hidden(choice.message.content or "")
        reason = StopReason.LENGTH if choice.finish_reason == "length" else StopReason.EOS
        ends = [at + len(text) for text in stop if (at := words.find(text)) >= 0]
        if ends:
            words, reason = words[: min(ends)], StopReason.STOP
        if len(words) > WORDS_CHARACTERS:
            raise _TryAgain(f"said {len(words):,} characters, and {WORDS_CHARACTERS:,} are allowed")
        ids = [*self.renderer.plain(words, first=False), self._end]
        spans = [Span(0, len(ids), NO_VERSION)]
        return UrlTurn(words, Completion(ids=ids, logprobs=[0.0] * len(ids), spans=spans, stop=reason))

    def _quoted(self, raw: bytes) -> str:
        """Return how an answer begins; the key is taken out before it is cut, or a part of it could stay."""
        return self._hidden(raw.decode(errors="replace"))[:MAX_QUOTED]

    def _hidden(self, text: str) -> str:
        """Without the key: a server may send back what it was sent."""
        if not self._secret:
            return text
        return text.replace(self._secret, HIDDEN).replace(orjson.dumps(self._secret).decode()[1:-1], HIDDEN)


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    """Raises _TryAgain beyond ANSWER_BYTES."""
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > ANSWER_BYTES:
            response.close()
            raise _TryAgain(f"answered with more than {ANSWER_BYTES:,} bytes")
    return bytes(raw)


def _as_sent(message: Message) -> dict[str, Any]:
    role = message.role if message.role in ROLES else "user"
    if not message.images:
        return {"role": role, "content": message.text}
    assert not isinstance(message.content, str)
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, Image):
            url = f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": role, "content": parts}
