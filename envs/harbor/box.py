"""Processes on a task's root file system: a sandbox with `box_runner.py`, which answers one request after the other.

    Box.start --> shared/sandbox (start_on) --> box_runner.py --> the commands of the agent, of a build, of the verifier

The runner is this machine's Python, mounted with its libraries below TOOLS and started through its own loader, so it
needs nothing of the root file system. What it answers is checked: the programs beside it may have replaced it.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import struct
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from opentinker.envs.harbor import box_runner
from opentinker.shared.sandbox.limits import Limits
from opentinker.shared.sandbox.overlay_root import Overlay, OverlayRoot
from opentinker.shared.sandbox.sandbox import Sandbox, Sandboxed, Unavailable
from opentinker.shared.types.errors import OpenTinkerError

TOOLS = "/run/opentinker"
RUNNER = f"{TOOLS}/runner.py"
HEAD = struct.Struct("<I")
START_S = 60.0
GRACE_S = 10.0
"""A runner that has not answered this long after its command's time limit is considered dead."""
FILE_S = 60.0
"""Time of a request that runs no command."""
ANSWER_BYTES = 8 << 20
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}


class BoxLost(OpenTinkerError):
    """The sandbox has ended; the text says why. Its files are still there."""


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

    def __init__(self, sandbox: Sandbox) -> None:
        loader = os.path.realpath(LOADERS[platform.machine()])
        libraries = [
            os.path.dirname(loader),
            "/usr/lib",
            "/usr/lib64",
            sysconfig.get_config_var("LIBDIR") or "/usr/lib",
        ]
        kept = [f"{TOOLS}{place}" for place in dict.fromkeys(libraries)]
        self.argv = [f"{TOOLS}{loader}", "--library-path", ":".join(kept), f"{TOOLS}{sandbox.python}", "-S", "-s", "-P"]
        self.variables = {"PYTHONHOME": f"{TOOLS}{sys.base_prefix}", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
        self.binds: dict[str, str | Path] = {
            f"{TOOLS}{place}": source for place, source in sandbox.system.items() if not os.path.islink(place)
        }
        self.binds[RUNNER] = box_runner.__file__


class Box:
    """A running sandbox."""

    def __init__(self, sandboxed: Sandboxed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sandboxed, self._reader, self._writer = sandboxed, reader, writer
        self._asking = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        interpreter: Interpreter,
        overlays: Sequence[Overlay],
        limits: Limits,
        cpus: Sequence[int],
        materials: Mapping[str, Path],
    ) -> Box:
        """`materials`: name below TOOLS -> directory, read-only. Raises Unavailable, OSError."""
        ours, theirs = socket.socketpair()
        root = OverlayRoot(overlays, {**interpreter.binds, **{f"{TOOLS}/{n}": path for n, path in materials.items()}})
        number = theirs.fileno()
        told = [str(number), json.dumps(limits.of_a_process()), json.dumps(list(cpus))]
        try:
            with theirs:
                argv = [*interpreter.argv, RUNNER, *told]
                sandboxed = await sandbox.start_on(root, argv, interpreter.variables, limits, number)
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        one = cls(sandboxed, reader, writer)
        try:
            async with asyncio.timeout(START_S):
                await one._answer()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, BoxLost):
            await one.end("it did not start")
            raise Unavailable(f"the sandbox of a Harbor task did not start: {sandboxed.reason or 'it ended'}") from None
        except BaseException:
            await one.end("it is no longer needed")
            raise
        return one

    @property
    def alive(self) -> bool:
        return self.sandboxed.process.returncode is None and not self._writer.is_closing()

    async def ask(self, op: str, timeout_s: float = FILE_S, **arguments: Any) -> Answer:
        """Raises BoxLost if the sandbox has ended or does not answer, BoxError."""
        request = json.dumps({"op": op, **arguments}).encode()
        async with self._asking:
            try:
                self._writer.write(HEAD.pack(len(request)) + request)
                async with asyncio.timeout(timeout_s + GRACE_S):
                    answer = await self._answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                await self.end("it ended")
                raise BoxLost(self.sandboxed.reason) from None
            except TimeoutError:
                await self.end("it did not answer")
                raise BoxLost("it did not answer") from None
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

    async def end(self, why: str) -> None:
        """End all its processes."""
        self._writer.close()
        self.sandboxed.kill(why)
        await self.sandboxed.wait()
