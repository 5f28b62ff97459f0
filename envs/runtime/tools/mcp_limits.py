"""Limits on what an MCP server may send: its list of tools, results, and unrequested messages. For the limits of each
tool see envs/tool_limits.py."""

from __future__ import annotations

MESSAGE_BYTES = 1 << 20
"""Largest message, which is read completely before it is parsed."""
UNASKED_BYTES = 16 << 20
"""Largest total sent in response to one request."""
UNASKED_MESSAGES = 10_000
MAX_PAGES = 16
CURSOR_CHARACTERS = 4096
BLOCKS = 256
"""Parts of one result."""


class TooMuch(Exception):
    """The server exceeded a limit, which the text names."""


class Allowance:
    """Bytes and messages that a server may still send before its next request."""

    def __init__(self) -> None:
        self._bytes = self._messages = 0

    def renew(self) -> None:
        self._bytes = self._messages = 0

    def take(self, size: int) -> None:
        """Count one message. Raise TooMuch."""
        self._bytes, self._messages = self._bytes + size, self._messages + 1
        if size > MESSAGE_BYTES:
            raise TooMuch(f"a message of more than {MESSAGE_BYTES:,} bytes")
        if self._bytes > UNASKED_BYTES or self._messages > UNASKED_MESSAGES:
            raise TooMuch(f"more than {UNASKED_BYTES:,} bytes or {UNASKED_MESSAGES:,} messages to one request")
