"""Inference jobs from Python: ask the model of one, and end it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from opentinker.sdk.http import ApiError, Http, Json, resource
from opentinker.shared.api_types import JobSummary

SILENCE_S = 900.0
"""A full job lets requests wait before the first word."""


class InferenceCalls:
    """Calls of AsyncClient for inference jobs."""

    _http: Http

    async def complete(self, id: str) -> JobSummary:
        """End an inference job; its state is succeeded then."""
        return await self._http.json(JobSummary, "POST", resource("jobs", id, "/complete"))

    async def chat(
        self, /, id: str, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> AsyncGenerator[Json, None]:
        """The chunks of the answer as they come, in OpenAI's form; `options` are those of its chat completions.

        Raises ApiError, also where the answer breaks off. It is not asked again by itself.
        """
        body = orjson.dumps({"messages": list(messages), **options, "stream": True})
        path = resource("jobs", id, "/v1/chat/completions")
        whole = False
        try:
            async with self._http.open(path, {}, read_s=SILENCE_S, body=body) as response:
                async for line in response.content:
                    said = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and said == b"[DONE]":
                        whole = True
                    elif line.startswith(b"data:"):
                        chunk: Json = orjson.loads(said)
                        if "error" in chunk:
                            raise ApiError(
                                f"the answer broke off: {chunk['error'].get('message', 'no reason was given')}"
                            )
                        yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._http.unreachable(error) from None
        if not whole:
            raise ApiError("the answer broke off: the connection was closed")


def text_of(chunk: Json) -> str:
    """Return the text that a chunk adds to the answer."""
    return "".join(str(choice.get("delta", {}).get("content") or "") for choice in chunk["choices"])
