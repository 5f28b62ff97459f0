"""Functions that tests offer as tools of a job, and a server of the Model Context Protocol.

python -m tests.samples.tool_samples [PORT]     over stdin and stdout, or over HTTP on the loopback address
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from typing import Any

LET_GO = threading.Event()


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


async def slowly(number: int) -> int:
    """The number, after a while."""
    await asyncio.sleep(0)
    return number


def stuck() -> str:
    """Does not return before the tests are over."""
    LET_GO.wait()
    return "late"


def leave() -> str:
    """Ends the process, it thinks."""
    sys.exit("gone")


async def leave_too() -> str:
    """The same, from the event loop."""
    raise KeyboardInterrupt


def stop() -> str:
    """Raises what no future can hold."""
    raise StopIteration("stopped")


async def cancelled() -> str:
    """Raises what looks as if it had been given up."""
    raise asyncio.CancelledError


def endless() -> Any:
    """Something without an end."""
    return iter(int, 1)


def huge(size: int) -> str:
    """A long text."""
    return "x" * size


def secretly_async() -> Any:
    """Does not say that it has to be awaited."""
    return slowly(3)


async def stubborn() -> str:
    """Goes on when it should end."""
    while not LET_GO.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    return "late"


FUNCTIONS = [double, slowly]
HOSTILE = [leave, leave_too, stop, cancelled, endless, huge, secretly_async]
NO_FUNCTION = [3]


def serve(port: int) -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("samples")
    kept: list[str] = []

    @server.tool()
    def keep(word: str) -> str:
        """Remember a word; say all of them."""
        kept.append(word)
        return " ".join(kept)

    @server.tool()
    def die() -> str:
        """End the server."""
        os._exit(3)

    @server.tool()
    def fail() -> str:
        """Cannot do it."""
        raise ToolError("not today")

    @server.tool()
    def variables() -> str:
        """Of the server's process."""
        return " ".join(sorted(os.environ))

    if port:
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
