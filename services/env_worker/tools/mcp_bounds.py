"""How much an MCP server may say: of its tools, of a result, and beside what it is asked."""

from __future__ import annotations

from typing import Any

from opentinker.services.env_worker.tools.errors import NoTools
from opentinker.shared import codec
from opentinker.shared.types import Tool

MESSAGE_BYTES = 1 << 20
"""Of one message, which is read whole."""
UNASKED_BYTES = 16 << 20
"""Of all that comes to one thing that was asked."""
UNASKED_MESSAGES = 10_000
MOST_TOOLS = 64
"""Of one server: every one of them is described in every prompt."""
MOST_PAGES = 16
CURSOR_CHARACTERS = 4096
DESCRIPTION_BYTES = 8192
SCHEMA_BYTES = 32 << 10
TOOLS_BYTES = 192 << 10
"""Of all descriptions and schemas together: they travel in the first reply of an episode."""
SCHEMA_DEPTH = 32
BLOCKS = 256
"""Parts of one result."""


class TooMuch(Exception):
    """The server says more than it may; the text says how much that is."""


class Allowance:
    """What one server may still say before it is asked something again."""

    def __init__(self) -> None:
        self._bytes = self._messages = 0

    def renew(self) -> None:
        self._bytes = self._messages = 0

    def take(self, size: int) -> None:
        """Of one message. Raises TooMuch."""
        self._bytes, self._messages = self._bytes + size, self._messages + 1
        if size > MESSAGE_BYTES:
            raise TooMuch(f"a message of more than {MESSAGE_BYTES:,} bytes")
        if self._bytes > UNASKED_BYTES or self._messages > UNASKED_MESSAGES:
            raise TooMuch(f"more than {UNASKED_BYTES:,} bytes or {UNASKED_MESSAGES:,} messages to one request")


def bounded_tools(tools: list[Tool]) -> list[Tool]:
    """Raises NoTools if there are none, too many, or one is described at a length that no prompt should have."""
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise NoTools(f"it has {len(tools)} tools; 1 to {MOST_TOOLS} can be offered")
    if len({tool.name for tool in tools}) < len(tools):
        raise NoTools("two of its tools have the same name")
    total = 0
    for tool in tools:
        if depth_beyond(tool.parameters, SCHEMA_DEPTH):
            raise NoTools(f"the schema of its tool {tool.name!r:.80} is nested deeper than {SCHEMA_DEPTH} levels")
        schema, about = len(codec.encode(tool.parameters)), len(tool.description.encode(errors="replace"))
        total += schema + about
        for what, size, most in (("description", about, DESCRIPTION_BYTES), ("schema", schema, SCHEMA_BYTES)):
            if size > most:
                raise NoTools(
                    f"the {what} of its tool {tool.name!r:.80} has {size:,} bytes; at most {most:,} are taken"
                )
    if total > TOOLS_BYTES:
        raise NoTools(f"its tools are described in {total:,} bytes; at most {TOOLS_BYTES:,} are taken together")
    return tools


def depth_beyond(value: Any, most: int) -> bool:
    """Whether lists and objects are nested deeper, without descending further than that."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
