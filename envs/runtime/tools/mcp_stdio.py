"""An MCP server that is a program: JSON lines over its stdin and stdout, one message each, with a length limit.

    server --lines--> _read --messages--> the library's session --messages--> _write --lines--> server

The program runs in a new process session: processes that it started end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TextIO

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest, jsonrpc_message_adapter

from opentinker.envs.runtime.tools.mcp_limits import MESSAGE_BYTES, Allowance, TooMuch
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.runtime.reexec import kill_group

GRACE_S = 2.0
"""For a program whose stdin was closed to end by itself."""
GONE_S = 2.0
Heard = SessionMessage | Exception
Complain = Callable[[str], None]


@contextlib.asynccontextmanager
async def talking(
    command: Sequence[str], variables: dict[str, str], stderr: TextIO, complain: Complain
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of the library's session. `complain` is called with the reason when a server is disconnected.

    Raise OSError if the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr, env=variables,
        start_new_session=True, limit=MESSAGE_BYTES,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    to_session, heard = anyio.create_memory_object_stream[Heard](0)
    said, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    allowance = Allowance()
    loop = asyncio.get_running_loop()
    reading = loop.create_task(_read(process.stdout, to_session, allowance, complain))
    writing = loop.create_task(_write(process.stdin, from_session, to_session, allowance))
    try:
        yield heard, said
    finally:
        try:
            heard.close()
            said.close()
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await _drain(process, reading)
        finally:
            kill_group(process.pid)
            await cancel_and_wait(reading, writing)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GONE_S):
                    await process.wait()
            for stream in (to_session, from_session):
                stream.close()


async def _drain(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    """Read the remaining output until the process has ended: a process that cannot write does not end."""
    assert process.stdout is not None
    await asyncio.wait([reading])
    while await process.stdout.read(1 << 16):
        pass
    await process.wait()


async def _read(
    output: asyncio.StreamReader, session: MemoryObjectSendStream[Heard], allowance: Allowance, complain: Complain
) -> None:
    """Read messages until the server ends or exceeds a limit; the session ends with it."""
    with session:
        try:
            while line := await _line(output):
                allowance.take(len(line))
                await session.send(_message(line))
        except TooMuch as error:
            complain(f"it said {error}")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            return  # the session is over


async def _line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # longer than the reader's limit
        raise TooMuch(f"a message of more than {MESSAGE_BYTES:,} bytes") from None


def _message(line: bytes) -> Heard:
    """Parse a line. Errors of the message are left to the session; the parser limits its nesting depth."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _write(
    into: asyncio.StreamWriter,
    session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[Heard],
    allowance: Allowance,
) -> None:
    with session:
        try:
            async for said in session:
                if isinstance(said.message, JSONRPCRequest):  # not our answers to what the server asks
                    allowance.renew()
                into.write(said.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await into.drain()
        except (ConnectionError, RuntimeError):
            to_session.close()  # pending requests fail
