"""The `python` tool in CPython with numpy and sympy: programs run in sandboxes (shared/sandbox/sandbox.py), one at a
time in each.

Every job has separate sandboxes in each env worker. Each holds a warm interpreter (sandbox_runner.py) that forks for a
program and cleans up after it, so programs cannot see each other's data. A program that kills its interpreter has
failed, and the next one gets a new sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from dataclasses import replace

import structlog

from opentinker.envs.runtime.tools import sandbox_runner
from opentinker.envs.tools import RESULT_BYTES, ToolError, ToolFailed, offer
from opentinker.shared.sandbox.sandbox import Sandbox, Sandboxed, Unavailable, own_packages
from opentinker.shared.spec.tools import ToolSpec

PLACE = "/run/runner.py"
HEAD = struct.Struct("<I")
START_S = 60.0
GRACE_S = 5.0
"""A runner that has not answered this long after its program's time limit is considered dead."""
PRINTED_BYTES = 5 * RESULT_BYTES
VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": "/tmp"}

log = structlog.get_logger()


def python(code: str) -> str:
    """Run a Python program. The answer is what it prints, and the value of its last expression.

    It is a full Python with numpy and sympy, without network. Every call starts fresh: variables and files of earlier
    calls are gone.

    Args:
        code: the program
    """
    raise NotImplementedError  # described here, done by Programs


class Runner:
    """One sandbox with its warm interpreter."""

    def __init__(self, sandboxed: Sandboxed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sandboxed, self._reader, self._writer = sandboxed, reader, writer

    @classmethod
    async def start(cls, sandbox: Sandbox, spec: ToolSpec) -> Runner:
        """Raises Unavailable, or OSError."""
        ours, theirs = socket.socketpair()
        limits = replace(sandbox.limits, memory_mb=spec.memory)
        with theirs:
            sandboxed = await sandbox.start(
                [sys.executable, PLACE, str(theirs.fileno())],
                binds={**own_packages(), PLACE: sandbox_runner.__file__},
                variables=VARIABLES,
                limits=limits,
                pass_fds=[theirs.fileno()],
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        one = cls(sandboxed, reader, writer)
        try:
            async with asyncio.timeout(START_S):
                await reader.readexactly(HEAD.size)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            await one.end("it did not start")
            raise Unavailable(
                f"the interpreter of the python tool did not start in its sandbox: {sandboxed.reason or 'it ended'};"
                f" memory_mb = {spec.memory} may be too little for it"
            ) from None
        except BaseException:
            await one.end("it is no longer needed")
            raise
        return one

    async def play(self, code: str, timeout_s: float) -> tuple[bool, str]:
        """Return whether the program succeeded, and its output. Raise ConnectionError if the runner is gone."""
        request = json.dumps({"code": code, "timeout_s": timeout_s, "most": PRINTED_BYTES}).encode()
        self._writer.write(HEAD.pack(len(request)) + request)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                (size,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                if not 1 <= size <= PRINTED_BYTES + 4096:
                    raise ConnectionError("it answered with nonsense")
                answer = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionError(self._sandboxed.reason or "the program ended the interpreter") from None
        except TimeoutError:
            raise ConnectionError("it did not answer") from None
        return answer[:1] == b"\1", answer[1:].decode(errors="replace")

    async def end(self, why: str) -> None:
        self._writer.close()
        self._sandboxed.kill(why)
        await self._sandboxed.wait()


class Programs:
    """The sandboxes of one job and one setting of the tool."""

    broken = False

    def __init__(self, sandbox: Sandbox, spec: ToolSpec) -> None:
        self._sandbox, self._spec = sandbox, spec
        self._idle: list[Runner] = []
        self._busy: set[Runner] = set()
        self._places = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self.offered = offer(python, self.run, timeout_s=None)
        """The tool. It limits its programs' time itself, because waiting for a sandbox does not count."""

    @classmethod
    async def open(cls, sandbox: Sandbox, spec: ToolSpec) -> Programs:
        """Open with the first sandbox running, to detect early whether sandboxes work. Raise Unavailable."""
        programs = cls(sandbox, spec)
        programs._idle.append(await Runner.start(sandbox, spec))
        return programs

    async def run(self, code: str) -> str:
        async with self._places:
            try:
                one = self._idle.pop() if self._idle else await Runner.start(self._sandbox, self._spec)
            except (Unavailable, OSError) as error:
                raise ToolError(f"the program could not be run: {error}") from None
            self._busy.add(one)
            try:
                good, output = await one.play(code, self._spec.timeout_s)
            except ConnectionError as error:
                await one.end("it has ended")
                raise ToolError(f"the program could not be run to its end: {error}") from None
            except BaseException:  # a late answer must not go to the next program
                await asyncio.shield(one.end("its program was given up"))
                raise
            finally:
                self._busy.discard(one)
            self._idle.append(one)
        if not good:
            raise ToolFailed(output)
        return output or "(no output: print what you want to see)"

    async def close(self) -> None:
        await asyncio.gather(*(one.end("the job no longer needs it") for one in [*self._idle, *self._busy]))
