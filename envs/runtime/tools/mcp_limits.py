"""How much an MCP server may say: of its list of tools, of a result, and beside what it is asked. What it may say of
each tool: envs/tool_limits.py."""

from __future__ import annotations

MESSAGE_BYTES = 1 << 20
"""Of one message, which is read whole."""
UNASKED_BYTES = 16 << 20
"""Of all that comes to one thing that was asked."""
UNASKED_MESSAGES = 10_000
MOST_PAGES = 16
CURSOR_CHARACTERS = 4096
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
