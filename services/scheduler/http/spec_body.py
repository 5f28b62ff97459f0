"""A job's spec as the body of a request: JSON, or TOML by its media type."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.errors import body_read, parse_json, read_json
from opentinker.shared.data import bounded_toml
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import mistake

TOML = "application/toml"
JSON = ("application/json", "application/octet-stream", "application/x-www-form-urlencoded", "text/plain")
"""Media types of clients that set none, for example curl's --data."""
MOST_TOML = 1 << 16
"""Characters; a longer spec is sent as JSON."""
MOST_MISTAKES = 20
"""Infinite numbers that a response names."""
MOST_PLACE = 200
"""Characters of the place of one."""


async def read_spec(request: web.Request) -> Any:
    """The body as plain data. Raises SpecError, SlowBody, BrokenBody; HTTPUnsupportedMediaType (415)."""
    kind = request.content_type
    if kind == TOML:
        async with body_read(request, "the body"):
            raw = await request.read()
        return await asyncio.to_thread(_toml, raw)
    if kind not in JSON and not kind.endswith("+json"):
        raise web.HTTPUnsupportedMediaType(text=f"send a spec as application/json or {TOML}, not as {kind[:100]}")
    try:
        return await read_json(request)
    except SpecError as error:
        if (await request.read()).lstrip()[:1] in (b"{", b"["):
            raise
        told = [{**one, "problem": f"{one['problem']}; TOML needs `Content-Type: {TOML}`"} for one in error.mistakes]
        raise SpecError(told) from None


def _toml(raw: bytes) -> Any:
    """Parse TOML into the data that the same spec in JSON would give. Raises SpecError."""
    try:
        data = bounded_toml.loads(raw.decode(), MOST_TOML)
        infinite = list(islice(_infinite(data), MOST_MISTAKES))
        plain = json.dumps(data, default=str)  # dates are texts
    except (ValueError, RecursionError) as error:
        raise SpecError.of("(body)", None, f"invalid TOML: {error}") from None
    if infinite:
        problem = "must be a finite number"
        raise SpecError([mistake(place[:MOST_PLACE], str(number), problem) for place, number in infinite])
    return parse_json(plain.encode())


def _infinite(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the places of numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        yield place, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield from _infinite(part, f"{place}.{name}" if place else str(name))
