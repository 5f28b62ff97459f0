"""Processes on a task's root file system: a sandbox with `box_runner.py`, which answers one request after the other.

    Workspace.started --> overlays.py or docker.py --> box_runner.py --> commands of the agent, a build, the verifier

The runner is this machine's Python, mounted with its libraries below TOOLS and started through its own loader, so it
needs nothing of the root file system. Its answers are validated: other programs in the sandbox may have replaced it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
import struct
import sys
import sysconfig
from pathlib import Path
from typing import Any, Protocol

import msgspec

from opentinker.envs.harbor import box_runner
from opentinker.shared.sandbox.sandbox import Unavailable, system_paths
from opentinker.shared.types.errors import OpenTinkerError

TOOLS = "/run/opentinker"
RUNNER, SHARED = f"{TOOLS}/runner.py", f"{TOOLS}/shared"
HEAD = struct.Struct("<I")
START_S = 60.0
EXIT_S = 1.0
"""Time that a sandbox without a runner has for ending by itself, which tells who ended it."""
GRACE_S = 10.0
"""A runner that has not answered this long after its command's time limit is considered dead."""
FILE_S = 60.0
"""Time of a request that runs no command."""
ANSWER_BYTES = 8 << 20
READ_BYTES = 1 << 20
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}


class BoxLost(OpenTinkerError):
    """The sandbox has ended; the text says why. Its files are still there."""

    def __init__(self, why: str, *, by_host: bool = False) -> None:
        """`by_host`: this machine ended it, or lost it, not what ran in it."""
        super().__init__(why)
        self.by_host = by_host


class BoxError(OpenTinkerError):
    """The request could not be carried out, such as reading a file that does not exist."""


class Answer(msgspec.Struct, kw_only=True):
    error: str = ""
    status: int = 0
    output: str = ""
    late: bool = False
    """The command took longer than it may."""
    cwd: str | None = None
    variables: dict[str, str] | None = None
    """Both as the command left them; None: it did not tell."""
    text: str = ""
    size: int = 0
    digest: str = ""
    count: int = 0


class Interpreter:
    """The command line of the runner, and what is mounted for it."""

    def __init__(self) -> None:
        loader = os.path.realpath(LOADERS[platform.machine()])
        libraries = [
            os.path.dirname(loader),
            "/usr/lib",
            "/usr/lib64",
            sysconfig.get_config_var("LIBDIR") or "/usr/lib",
        ]
        kept = ":".join(f"{TOOLS}{place}" for place in dict.fromkeys(libraries))
        python = os.path.realpath(sys.executable)
        self.argv = [f"{TOOLS}{loader}", "--library-path", kept, f"{TOOLS}{python}", "-S", "-s", "-P"]
        self.variables = {"PYTHONHOME": f"{TOOLS}{sys.base_prefix}", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
        self.binds: dict[str, str | Path] = {
            f"{TOOLS}{place}": source for place, source in system_paths().items() if not os.path.islink(place)
        }
        self.binds[RUNNER] = box_runner.__file__


class BoxProcess(Protocol):
    """The process that holds a sandbox; the sandbox ends with it."""

    reason: str
    """Why it was killed, if it was."""

    @property
    def was_lost(self) -> bool:
        """Return whether a signal from outside ended it: not from a process in it, nor from `kill`. Known when `wait`
        has returned."""

    @property
    def pid(self) -> int: ...

    @property
    def has_ended(self) -> bool: ...

    def kill(self, reason: str) -> None:
        """Kill all processes of the sandbox."""

    async def wait(self) -> object:
        """Wait until they have ended and `reason` is known."""


class Box:
    """A running sandbox."""

    def __init__(self, process: BoxProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self._reader, self._writer = process, reader, writer
        self._asking = asyncio.Lock()

    async def ready(self) -> Box:
        """Wait until the runner answers. Raises Unavailable."""
        try:
            async with asyncio.timeout(START_S):
                await self._answer()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            await self.end("it did not start")
            reason = self.process.reason or "it ended"
            raise Unavailable(f"the sandbox of a Harbor task did not start: {reason}") from None
        except BaseException:
            await self.end("it is no longer needed")
            raise
        return self

    @property
    def alive(self) -> bool:
        return not self.process.has_ended and not self._writer.is_closing()

    async def ask(self, op: str, timeout_s: float = FILE_S, **arguments: Any) -> Answer:
        """Raises BoxLost if the sandbox has ended or does not answer, BoxError."""
        request = json.dumps({"op": op, **arguments}).encode()
        async with self._asking:
            try:
                self._writer.write(HEAD.pack(len(request)) + request)
                async with asyncio.timeout(timeout_s + GRACE_S):
                    answer = await self._answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                raise await self.lost() from None
            except TimeoutError:
                await self.end("it did not answer")
                raise BoxLost("it did not answer", by_host=True) from None
            except BaseException:  # its late answer would be read as that of the next request
                await asyncio.shield(self.end("a request was given up"))
                raise
        if answer.error:
            raise BoxError(answer.error)
        return answer

    async def _answer(self) -> Answer:
        (size,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        if size > ANSWER_BYTES:
            raise ConnectionError("it answered with nonsense")
        try:
            return msgspec.json.decode(await self._reader.readexactly(size), type=Answer)
        except msgspec.MsgspecError:
            raise ConnectionError("it answered with nonsense") from None

    async def lost(self) -> BoxLost:
        """End what is left of a sandbox whose runner has ended, and return why it did."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), EXIT_S)
        by_host = self.process.has_ended and self.process.was_lost
        await self.end("it ended")
        return BoxLost(self.process.reason or "it ended", by_host=by_host)

    async def end(self, why: str) -> None:
        """End all its processes."""
        self._writer.close()
        self.process.kill(why)
        await self.process.wait()


async def connected(process: BoxProcess, connection: socket.socket) -> Box:
    """Return the sandbox whose runner speaks over this socket. Raises Unavailable."""
    try:
        reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
    except BaseException:
        connection.close()
        process.kill("it is no longer needed")
        await process.wait()
        raise
    return await Box(process, reader, writer).ready()
