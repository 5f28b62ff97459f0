"""Client of one OpenAI-compatible server, with patience: a server that is full or restarts is asked again."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import aiohttp
import orjson

from opentinker.client.utils.utils import resolve_path
from opentinker.sdk.http import api_key
from opentinker.shared.backoff import Backoff

OURS = re.compile(r"/v1/jobs/j-[a-z0-9]{10}$")
AGAIN = (429, 502, 503, 504)
PATIENCE_S = 300.0
"""From the first try that failed: a request may wait long for its answer before."""
ANSWER_S = 1800.0
"""Time limit of one request: a full server lets it wait."""


class ChatError(Exception):
    """The server refused, or was not reached (`status` 0). `code` as the server says it."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        self.status, self.code = status, code
        super().__init__(message)


class ChatServer:
    """`url` with or without the /v1 at its end. Inference jobs get our key, other servers OPENAI_API_KEY. `model`: a
    name that is served, or a path; it may be left out where one alone is served."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatServer:
        key = api_key(self.url) if OURS.search(self.url) else os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=5.0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            self.model = self._served((await self._json("GET", "/v1/models"))["data"])
        except BaseException:
            await self._session.close()
            raise
        return self

    def _served(self, cards: list[dict[str, Any]]) -> str:
        """The name of the model that is asked for. A card's `root` says that it is another name of the same one."""
        roots = {str(card["id"]): str(card.get("root") or card["id"]) for card in cards}
        if not roots:
            raise ChatError(f"{self.url} serves no model")
        if self.model is None:
            if len(set(roots.values())) > 1:
                raise ChatError(f"{self.url} serves several models, say which one: {', '.join(roots)}")
            return next(iter(roots))
        wanted = (self.model, resolve_path(self.model))
        for name, root in roots.items():
            if name in wanted or root in wanted:
                return name
        raise ChatError(f"{self.url} does not serve {self.model!r}; it serves: {', '.join(roots)}")

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """The whole answer. Raises ChatError."""
        return await self._json("POST", "/v1/chat/completions", {"model": self.model, "messages": messages, **options})

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        deadline, backoff = 0.0, Backoff(0.2, 5.0)
        while True:
            try:
                status, answer = await self._once(method, path, body)
                problem = _problem(answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                status, answer, problem = (
                    0,
                    None,
                    ChatError(f"cannot reach {self.url}: {error or type(error).__name__}"),
                )
            if 200 <= status < 300 and isinstance(answer, dict):
                return answer
            deadline = deadline or time.monotonic() + PATIENCE_S
            if (status and status not in AGAIN) or time.monotonic() + backoff.next_s > deadline:
                raise ChatError(str(problem) or f"{self.url}{path} answered {status}", status, problem.code)
            await backoff.sleep()

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        assert self._session is not None
        async with self._session.request(method, self.url + path, json=body) as response:
            raw = await response.read()
            try:
                return response.status, orjson.loads(raw)
            except ValueError:
                return response.status, None


def _problem(answer: Any) -> ChatError:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return ChatError(str(answer.get("detail", "")) if isinstance(answer, dict) else "")
    return ChatError(str(error.get("message", "")), code=str(error.get("code") or ""))
