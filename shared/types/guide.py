"""A request's constraint on the answer."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_SCHEMA_BYTES = 64 * 1024


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or a text in JSON; the call comes first if both are set."""

    call: str | None = None
    """Name of the tool that must be called; empty: any of those offered."""
    schema: dict[str, Any] | None = None
    """JSON schema of the text. A tool may be called in its place, if some are offered."""
