"""HTTP server on loopback or a Unix socket, through which one agent calls the policy for one episode, in OpenAI's and
Anthropic's forms.

    POST {base}/v1/chat/completions    messages, tools, streams
    POST {base}/v1/responses           the same as OpenAI's Responses API
    POST {base}/v1/messages            the same as Anthropic's Messages API
    POST {base}/v1/completions         a prompt as plain text or as token ids
    GET  {base}/v1/models              the model; {base}/v1/models/NAME by its name
    POST {base}/inference/v1/generate  token ids in, token ids and logprobs out (X-Session-ID tells conversations apart)

Consumes HTTP requests, produces responses in order of arrival; waits for the policy's turn. `{base}` is
`http://127.0.0.1:PORT/KEY`, of a socket `/KEY`, with a random key per episode; requests without the key get a 404.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path

import msgspec
from aiohttp import web

from opentinker.envs.base import Action
from opentinker.shared.dialects import DIALECTS, Dialect, event
from opentinker.shared.openai.answers import card_of, generate_answer, models, whole_stream
from opentinker.shared.openai.fields import InvalidField, Json, too_long
from opentinker.shared.openai.requests import ParsedRequest, parse_generate
from opentinker.shared.types.env_protocol import Policy

BODY_BYTES = 32 * 1024 * 1024
SESSION = "X-Session-ID"

GENERATE = "inference/v1/generate"
SERVED = ("v1/models", *(f"v1/{route}" for route in DIALECTS), GENERATE)


class PendingRequest:
    """One request of an agent that waits for the policy."""

    def __init__(self, asked: ParsedRequest) -> None:
        self.asked = asked
        self.answer: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        """Set to the policy's turn, or to InvalidField."""

    @property
    def gone(self) -> bool:
        """Return whether the client has disconnected."""
        return self.answer.done()


class Endpoint:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._key = secrets.token_urlsafe(24)
        self._asked: asyncio.Queue[PendingRequest] = asyncio.Queue()
        self._runner: web.AppRunner | None = None
        self._pending: set[PendingRequest] = set()

    async def start(self) -> str:
        """Start the server and return the base URL for OpenAI clients, which ends in /v1."""
        runner = await self._prepare()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/{self._key}/v1"

    async def start_on(self, socket: Path) -> str:
        """Start the server on a Unix socket that every user may connect to, and return the URL's path, which ends in
        /v1. Raises OSError."""
        runner = await self._prepare()
        folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
        try:  # the kernel allows 107 bytes of a socket's path, and data directories may have longer ones
            await web.UnixSite(runner, f"/proc/self/fd/{folder}/{socket.name}").start()
        finally:
            os.close(folder)
        os.chmod(socket, 0o666)
        return f"/{self._key}/v1"

    async def _prepare(self) -> web.AppRunner:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{key}/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        return self._runner

    async def close(self) -> None:
        """Cancel pending requests and stop the server."""
        for pending in list(self._pending):
            pending.answer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def next(self) -> PendingRequest:
        """Wait for and return the oldest request whose client is still connected."""
        while True:
            pending = await self._asked.get()
            if not pending.gone:
                return pending

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        dialect = DIALECTS.get(request.match_info["path"].removeprefix("v1/"))
        try:
            return await self._route(request, dialect)
        except InvalidField as refused:
            return web.json_response(dialect.error(refused) if dialect else refused.body, status=refused.status)

    async def _route(self, request: web.Request, dialect: Dialect | None) -> web.StreamResponse:
        """`dialect`: that of the path, if it has one."""
        if not secrets.compare_digest(request.match_info["key"].encode(), self._key.encode()):
            raise InvalidField("no such model server", status=404)
        path = request.match_info["path"]
        listed = models(self._policy.model, self._policy.context_length)
        if path == "v1/models" and request.method == "GET":
            return web.json_response(listed)
        if path.startswith("v1/models/") and request.method == "GET":
            return web.json_response(card_of(listed, path.removeprefix("v1/models/")))
        if path not in SERVED:
            there = ", ".join(SERVED)
            raise InvalidField(f"{request.method} {path} is not served; there are: {there}", status=404)
        if request.method != "POST":
            raise InvalidField(f"{path} takes POST", status=405)
        parse = parse_generate if dialect is None else dialect.parse
        asked = parse(await _body(request), request.headers.get(SESSION, ""))
        asked = msgspec.structs.replace(asked, model=asked.model or self._policy.model)
        self._check_length(asked)
        action = await self._answer(asked)
        if dialect is None:
            return web.json_response(generate_answer(asked, action))
        if asked.stream:
            return await _stream(request, dialect, asked, action)
        return web.json_response(dialect.answer(asked, action, ""))

    def _check_length(self, asked: ParsedRequest) -> None:
        limit = self._policy.context_length
        if asked.token_ids is not None and limit and len(asked.token_ids) >= limit:
            raise too_long(limit, len(asked.token_ids))

    async def _answer(self, asked: ParsedRequest) -> Action:
        """Wait for the policy's turn. If the client disconnects, the request leaves the queue, or its answer is dropped
        if the policy has it already."""
        pending = PendingRequest(asked)
        self._pending.add(pending)
        self._asked.put_nowait(pending)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            pending.answer.cancel()
            raise
        finally:
            self._pending.discard(pending)


async def _body(request: web.Request) -> Json:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise InvalidField(f"the request is larger than {BODY_BYTES:,} bytes", status=413) from None
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidField("the body must be a JSON object")
    return body


async def _stream(request: web.Request, dialect: Dialect, asked: ParsedRequest, action: Action) -> web.StreamResponse:
    """Send the whole answer as the events of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = b"".join(map(event, whole_stream(dialect.stream(asked), asked, action)))
    await response.write(events + dialect.last)
    await response.write_eof()
    return response
