"""The env worker's side of a child process that plays sessions of one environment and one job.

Consumes calls of sessions and sends them over a socket pair to the process (`child.py`), which plays them one at a time
in its only thread. Cancelling the running call kills the process and everything that it has started. Answers of a
sandboxed child are untrusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import structlog

from opentinker.envs.runtime.child_protocol import HEAD, MAX_MESSAGE_BYTES, ChildAnswer, ChildCall, frame
from opentinker.shared.messaging.reply_validation import failure
from opentinker.shared.runtime.reexec import below, kill_group
from opentinker.shared.security import egress
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import OpenSession
from opentinker.shared.types.errors import OpenTinkerError

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", egress.VARIABLE)
"""Environment variables of the service that a child inherits; NATS and Redis addresses are not for user code."""
END_S = 2.0
"""Time from the end of a child's answers to its exit."""

log = structlog.get_logger()


class Running(Protocol):
    """A running process and its descendants."""

    reason: str
    """Why it was killed, if it was."""

    def kill(self, reason: str) -> None: ...
    async def wait(self) -> int: ...


Start = Callable[[int], Awaitable[Running]]
"""Starts a process that answers on the socket with the given descriptor."""


class EnvironmentChild:
    """`key`: environment and job of its sessions. `checked`: validate its answers as untrusted input."""

    def __init__(self, start: Start, key: str, *, checked: bool) -> None:
        self.key = key
        self.checked = checked
        self.sessions = 0
        self.leaving = False
        """Takes no new sessions, because another key waits for its place."""
        self.spent = False
        """Takes no new sessions, because it asked to be replaced."""
        self.idle_s = 60.0
        """Without sessions it ends after this time: the env worker is not notified when a job finishes."""
        self.gone = ""
        """Why the child can no longer be used."""
        self._launch = start
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[ChildAnswer]] = {}
        """Calls in order of play; the first is running. Abandoned calls stay in."""
        self._unsent: list[bytes] = []
        """Calls made before the process was up."""
        self._process: Running | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._importing: asyncio.Task[ChildAnswer | None] | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    def come(self) -> None:
        self.sessions += 1
        if self._idle is not None:
            self._idle.cancel()

    def leave(self) -> None:
        self.sessions -= 1
        if self.sessions == 0 and self._importing is not None and not self._importing.done():
            self.kill("its import was abandoned")
        elif self.sessions == 0:
            self._idle = asyncio.get_running_loop().call_later(self.idle_s, self.kill, "it was idle")

    def retire(self) -> None:
        """Called after a session was closed: a child to be replaced ends with its last one."""
        if self.spent and not self.sessions and not self._waiting:
            self.kill("it was spent: recycle_after or memory_mb of what it played")

    async def prepare(self, request: OpenSession, within_s: float) -> ChildAnswer | None:
        """Import the environment once for all sessions; a failed import is retried by the next call. Return None if it
        took longer than `within_s` from the start of the process, which is then killed."""
        importing = self._importing
        if importing is None:
            importing = self._importing = asyncio.get_running_loop().create_task(self._import(request, within_s))
        answer = await asyncio.shield(importing)
        if answer is not None and answer.reply.failure is not None and self._importing is importing:
            self._importing = None
        return answer

    async def _import(self, request: OpenSession, within_s: float) -> ChildAnswer | None:
        try:
            async with asyncio.timeout(within_s):
                return await self.call("import", request)
        except TimeoutError:
            return None

    async def call(self, verb: str, body: Any) -> ChildAnswer:
        """Play one call. If it is cancelled while the child is busy with it, the child is killed."""
        if self.gone:
            return ChildAnswer(0, failure("", Ending.ENV_ERROR, f"the environment's process is gone: {self.gone}"))
        serial, began = self._serial + 1, time.monotonic()
        self._serial = serial
        self._waiting[serial] = waiting = asyncio.get_running_loop().create_future()
        self._send(frame(ChildCall(serial, verb, msgspec.Raw(codec.encode(body)))))
        try:
            answer: ChildAnswer = await waiting
        except asyncio.CancelledError:
            playing, oldest = next(iter(self._waiting.items()), (0, waiting))
            if playing == serial or (playing and oldest.cancelled()):
                took_s = time.monotonic() - began
                self.kill(f"it was killed because {verb} of one of its sessions had not returned after {took_s:.1f} s")
            raise
        return answer

    def _send(self, data: bytes) -> None:
        if self._writer is None:
            self._unsent.append(data)
        else:
            self._writer.write(data)

    def kill(self, reason: str) -> None:
        self.gone = self.gone or reason
        if self._process is not None:
            self._process.kill(reason)

    async def ended(self) -> None:
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        """Run the process from start to end, then answer every call that is left."""
        reason = ""
        try:
            reader = await self._start()
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > MAX_MESSAGE_BYTES:
                    raise codec.WireError(f"an answer of {size:,} bytes; at most {MAX_MESSAGE_BYTES:,} are taken")
                answer = codec.decode(ChildAnswer, await reader.readexactly(size))
                self.spent = self.spent or answer.spent
                waiting = self._waiting.pop(answer.serial, None)
                if waiting is None:
                    raise codec.WireError(f"an answer to call {answer.serial}, which was not made or is answered")
                if not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended: see its exit status
        except (OSError, OpenTinkerError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            await self._finish(reason)

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self._launch(theirs.fileno())
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self.gone:  # abandoned while it was starting
            self.kill(self.gone)
        self._writer.writelines(self._unsent)
        return reader

    async def _finish(self, reason: str) -> None:
        if self._process is not None:
            if reason:
                self._process.kill(reason)
            status = await self._status(self._process)
            ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            reason = reason or self._process.reason or ended
        self.gone = self.gone or reason
        if self._writer is not None:
            self._writer.close()
        if self._idle is not None:
            self._idle.cancel()
        log.warning("environment_process_ended", reason=self.gone, sessions=self.sessions)
        for waiting in self._waiting.values():
            if not waiting.done():
                why = f"the environment's process ended: {self.gone}"
                waiting.set_result(ChildAnswer(0, failure("", Ending.ENV_ERROR, why)))

    async def _status(self, process: Running) -> int:
        try:
            async with asyncio.timeout(END_S):
                return await process.wait()
        except TimeoutError:
            process.kill("it closed its socket and went on")
            return await process.wait()


class Plain:
    """A child process of the level `process`; its keeper ends everything that it started (child_keeper.py), within
    `kill_s` after SIGTERM."""

    def __init__(self, process: asyncio.subprocess.Process, kill_s: float = 10.0) -> None:
        self.reason = ""
        self._process, self._kill_s = process, kill_s
        self._last: asyncio.TimerHandle | None = None

    def kill(self, reason: str) -> None:
        if self._process.returncode is None and self._last is None:
            self.reason = self.reason or reason
            self._process.terminate()
            self._last = asyncio.get_running_loop().call_later(self._kill_s, self._kill_all)

    def _kill_all(self) -> None:
        """Kill the descendants of a keeper that was stopped before it could."""
        for pid in below(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        kill_group(self._process.pid)

    async def wait(self) -> int:
        status = await self._process.wait()
        if self._last is not None:
            self._last.cancel()
        kill_group(self._process.pid)
        return status


async def start_plain(modules: bool, interpreter: str, python_path: str, descriptor: int) -> Plain:
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        interpreter,
        "-P",  # the working directory comes last, so that nothing there hides this package
        "-m",
        "opentinker.envs.runtime.child_keeper",
        str(descriptor),
        str(int(modules)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=2,  # what user code prints goes to the log of the worker, never into the protocol
        pass_fds=[descriptor],
        env=variables,
        start_new_session=True,
    )
    return Plain(process)
