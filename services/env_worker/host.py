"""Child processes for environments that block: a hung or crashed child costs its own sessions and nothing else.

Parent side. Consumes calls of sessions, sends them over a socket pair to the least busy child (`child.py`), which
plays them one after the other in its only thread. Cancelling the call that a child is playing kills that child.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec
import structlog

from opentinker.services.env_worker.player import failure, on_worker
from opentinker.services.env_worker.wire import HEAD, Answer, Call, frame
from opentinker.shared import codec, egress
from opentinker.shared.sessions import CloseSession, OpenSession, SessionReply, StepSession
from opentinker.shared.types import Ending

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", egress.VARIABLE)
"""Of the service's environment variables; its NATS and Redis addresses are not for user code."""

log = structlog.get_logger()


class Host:
    """At most `children` processes with `per_child` sessions each, started when first needed."""

    def __init__(self, *, children: int, per_child: int, modules: bool) -> None:
        self._limit = children
        self._per_child = per_child
        self._modules = modules
        self._children: list[Child] = []

    def player(self, worker: str) -> ChildPlayer | None:
        """A place in a child, or None when all are taken."""
        self._children = [child for child in self._children if not child.gone]
        least = min(self._children, key=lambda child: child.sessions, default=None)
        if (least is None or least.sessions > 0) and len(self._children) < self._limit:
            least = Child(self._modules)
            self._children.append(least)
        if least is None or least.sessions >= self._per_child:
            return None
        return ChildPlayer(worker, least)

    async def close(self) -> None:
        for child in self._children:
            child.kill("the env worker is stopping")
        await asyncio.gather(*(child.ended() for child in self._children))


class ChildPlayer:
    """One session's place in a child."""

    def __init__(self, worker: str, child: Child) -> None:
        self._worker = worker
        self._child = child
        self._session = ""
        child.sessions += 1

    async def open(self, request: OpenSession) -> SessionReply:
        self._session = request.session
        return on_worker(await self._child.call("open", request), self._worker)

    async def step(self, request: StepSession) -> SessionReply:
        return on_worker(await self._child.call("step", request), self._worker)

    async def close(self) -> None:
        self._child.sessions -= 1
        await self._child.call("close", CloseSession(session=self._session))


class Child:
    def __init__(self, modules: bool) -> None:
        self.sessions = 0
        self.gone = ""
        """Why the child can no longer be used."""
        self._modules = modules
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[SessionReply]] = {}
        """In the order in which the child plays them: the first is the one being played. Given-up calls stay in."""
        self._unsent: list[bytes] = []
        """Calls made before the process was up."""
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def call(self, verb: str, body: Any) -> SessionReply:
        """Play one call. If it is cancelled while the child is busy with it, the child is killed."""
        if self.gone:
            return failure("", Ending.ENV_ERROR, f"the environment's process is gone: {self.gone}")
        serial = self._serial = self._serial + 1
        self._waiting[serial] = waiting = asyncio.get_running_loop().create_future()
        self._send(frame(Call(serial, verb, msgspec.Raw(codec.encode(body)))))
        try:
            reply: SessionReply = await waiting
        except asyncio.CancelledError:
            playing, oldest = next(iter(self._waiting.items()), (0, waiting))
            if playing == serial or (playing and oldest.cancelled()):
                self.kill(f"it was killed because {verb} did not return in time in one of its sessions")
            raise
        return reply

    def _send(self, data: bytes) -> None:
        if self._writer is None:
            self._unsent.append(data)
        else:
            self._writer.write(data)

    def kill(self, reason: str) -> None:
        self.gone = self.gone or reason
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> None:
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        """From the start of the process to its end; every call that is left then gets an answer."""
        reason = ""
        try:
            reader = await self._start()
            while True:
                head = await reader.readexactly(HEAD.size)
                answer = codec.decode(Answer, await reader.readexactly(HEAD.unpack(head)[0]))
                waiting = self._waiting.pop(answer.serial, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended: see its exit status
        except (OSError, codec.WireError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            await self._finish(reason)

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "opentinker.services.env_worker.child",
                str(theirs.fileno()),
                str(int(self._modules)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what user code prints goes to the log of the worker, never into the protocol
                pass_fds=[theirs.fileno()],
                env=variables,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self.gone:  # given up while it was starting
            self.kill(self.gone)
        self._writer.writelines(self._unsent)
        return reader

    async def _finish(self, reason: str) -> None:
        if self._process is not None:
            if reason and self._process.returncode is None:
                self._process.kill()
            status = await self._process.wait()
            reason = reason or (f"killed by signal {-status}" if status < 0 else f"exit status {status}")
        self.gone = self.gone or reason
        if self._writer is not None:
            self._writer.close()
        log.warning("environment_process_ended", reason=self.gone, sessions=self.sessions)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(failure("", Ending.ENV_ERROR, f"the environment's process ended: {self.gone}"))
