"""Serves long answers: whole, or the range that an interrupted download still needs (RFC 9110, one range)."""

from __future__ import annotations

import re
from contextlib import aclosing

from aiohttp import web

from opentinker.services.scheduler.artifacts.store import Opened
from opentinker.services.scheduler.http.errors import problem

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def wanted(request: web.Request, size: int, etag: str) -> tuple[int, int] | None:
    """First byte and length of what is asked for; None: there is no such part. Everything, where no single range is
    asked for, or of something else (`If-Range`)."""
    given = _RANGE.fullmatch(request.headers.get("Range", ""))
    if given is None or given[1] == given[2] == "" or request.headers.get("If-Range", etag) != etag:
        return 0, size
    if given[1] == "":  # the last N bytes
        length = min(int(given[2]), size)
        return (size - length, length) if length else None
    first = int(given[1])
    last = min(int(given[2]), size - 1) if given[2] else size - 1
    if given[2] and int(given[2]) < first:
        return 0, size
    return (first, last - first + 1) if first < size else None


async def send(
    request: web.Request, content: Opened, *, etag: str, name: str, media: str, headers: dict[str, str]
) -> web.StreamResponse:
    """Closes `content`. `name`: of the file that it would be saved as."""
    try:
        size = content.size
        range_ = wanted(request, size, etag)
        if range_ is None:
            response = problem(
                416, f"the range begins beyond the {size} bytes of the content", title="Range not satisfiable"
            )
            response.headers["Content-Range"] = f"bytes */{size}"
            return response
        first, length = range_
        answer = web.StreamResponse(
            status=200 if length == size else 206,
            headers={
                "Content-Disposition": f'attachment; filename="{name}"',
                "ETag": etag,
                "Accept-Ranges": "bytes",
                "Cache-Control": "private, no-cache",
                "X-Content-Type-Options": "nosniff",
                **headers,
            },
        )
        if length != size:
            answer.headers["Content-Range"] = f"bytes {first}-{first + length - 1}/{size}"
        answer.content_type = media
        answer.content_length = length
        await answer.prepare(request)
        async with aclosing(content.chunks(first, length)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await answer.write(chunk)
        return answer
    finally:
        content.close()
