"""Child processes for environments that block, or that nobody trusts: one that hangs or crashes costs its own sessions
and nothing else.

Parent side. Consumes calls of sessions, sends them over a socket pair to the least busy child (`child.py`), which
plays them one after the other in its only thread. Cancelling the call that a child is playing kills that child, and
every process that it has started. A sandboxed child plays one environment of one job, and nobody believes its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog

from opentinker.services.env_worker.interpreters import Interpreters
from opentinker.services.env_worker.player import on_worker
from opentinker.services.env_worker.resolver import CHECK_S
from opentinker.services.env_worker.sandboxes import Sandboxes
from opentinker.services.env_worker.turns import Turns
from opentinker.services.env_worker.wire import HEAD, LARGEST, Answer, Call, frame
from opentinker.shared import codec, egress
from opentinker.shared.errors import OpenTinkerError, SpecError
from opentinker.shared.replies import failure, sound, sound_mistakes
from opentinker.shared.sessions import CloseSession, EnvCheck, OpenSession, SessionReply, StepSession
from opentinker.shared.types import Ending

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", egress.VARIABLE)
"""Of the service's environment variables; its NATS and Redis addresses are not for user code."""
IDLE_S = 60.0
"""A sandboxed child without sessions ends after so long, with whatever its code left running."""
CHECKS = 2
"""At once; more wait."""
COSTS = 1000
"""Environments whose cost is remembered."""
END_S = 2.0
"""Between the end of a child's answers and its own."""

log = structlog.get_logger()


class Running(Protocol):
    """A process that was started, with all that it starts itself."""

    reason: str
    """Why it was killed, if it was."""

    def kill(self, reason: str) -> None: ...
    async def wait(self) -> int: ...


Start = Callable[[int], Awaitable[Running]]
"""Of a process that answers on the socket of that number."""


class Host:
    """At most `children` processes with `per_child` sessions each, started when first needed."""

    def __init__(
        self,
        *,
        children: int,
        per_child: int,
        modules: bool,
        sandboxes: Sandboxes | None = None,
        interpreters: Interpreters | None = None,
    ) -> None:
        self.interpreters = interpreters or Interpreters({})
        self._limit = children
        self._per_child = per_child
        self._modules = modules
        self._sandboxes = sandboxes
        self._children: list[Child] = []
        self._turns = Turns()
        self._checks = asyncio.Semaphore(CHECKS)
        self._costs: dict[str, float] = {}

    @property
    def has_children(self) -> bool:
        return self._limit > 0

    def cost(self, environment: str) -> float:
        """Of a session, as its child has said it; 1 before one has."""
        return self._costs.get(environment, 1.0)

    def player(self, worker: str, environment: str = "") -> ChildPlayer | None:
        """A place in a child, or None when all are taken."""
        return self._place(worker, self.interpreters.of(environment), self._starter(environment))

    def _starter(self, environment: str) -> Start:
        """Of an ordinary child, by this interpreter or by the environment's own."""
        interpreter = self.interpreters.of(environment)
        if not interpreter:
            return partial(_start, self._modules, sys.executable, os.pathsep.join(filter(None, sys.path)))
        return partial(_start, self._modules, interpreter, self.interpreters.python_path)

    async def sandboxed(self, worker: str, request: OpenSession) -> ChildPlayer | None:
        """A place in a sandboxed child of the session's environment and job, or None when all are taken.

        Raises SpecError if there can be none here.
        """
        sandboxes = self._with_sandboxes()
        program = await sandboxes.program(request.environment)
        return self._place(worker, f"{request.environment} of {request.job}", partial(sandboxes.start, program))

    async def check(self, request: EnvCheck) -> list[dict[str, Any]]:
        """The mistakes, found in a child of its own, sandboxed if its sessions are.

        Raises SpecError if there can be none here.
        """
        if request.isolation == "process":
            start = self._starter(request.name)
        else:
            sandboxes = self._with_sandboxes()
            start = partial(sandboxes.start, await sandboxes.program(request.name))
        async with self._checks:
            child = Child(start, "check")
            try:
                async with asyncio.timeout(CHECK_S):
                    answer = await child.call("check", request)
            except TimeoutError:
                return [_wrong(request.name, f"importing it and checking its config took more than {CHECK_S:g} s")]
            finally:
                child.kill("the check is over")
                await child.ended()
        if answer.reply.failure is not None:
            return [_wrong(request.name, sound(answer.reply, "", player=False).error)]
        return sound_mistakes(answer.errors)

    async def close(self) -> None:
        for child in self._children:
            child.kill("the env worker is stopping")
        await asyncio.gather(*(child.ended() for child in self._children))
        self.interpreters.close()

    def _with_sandboxes(self) -> Sandboxes:
        if self._sandboxes is None:
            raise SpecError(
                [{"field": "environment.isolation", "value": "sandbox", "problem": "is not available here"}]
            )
        return self._sandboxes

    def _place(self, worker: str, key: str, start: Start) -> ChildPlayer | None:
        now = asyncio.get_running_loop().time()
        self._children = [child for child in self._children if not child.gone]
        due = self._turns.due(now)
        self._make_way(due)
        own = [child for child in self._children if child.key == key and not child.leaving and not child.spent]
        least = min(own, key=lambda child: child.sessions, default=None)
        if (least is None or least.sessions > 0) and self._room(key, due):
            least = Child(start, key)
            self._children.append(least)
        if least is None or least.sessions >= self._per_child:
            if not own:
                self._turns.refused(key, now)
            return None
        self._turns.placed(key)
        return ChildPlayer(worker, least, self._note_cost)

    def _note_cost(self, environment: str, cost: float) -> None:
        if len(self._costs) >= COSTS:
            self._costs.clear()
        self._costs[environment] = cost

    def _make_way(self, due: str | None) -> None:
        """While somebody's turn has come, one child takes no new sessions: of those who have most, the oldest."""
        if due is None:
            for child in self._children:
                child.leaving = False
        elif len(self._children) >= self._limit and not any(child.leaving for child in self._children):
            count = Counter(child.key for child in self._children)
            max(self._children, key=lambda child: count[child.key]).leaving = True  # the first: they stand by age

    def _room(self, key: str, due: str | None) -> bool:
        """For one more child: an idle one of another key leaves its place to it."""
        if len(self._children) < self._limit:
            return True
        free = [child for child in self._children if child.sessions == 0 and (not child.leaving or key == due)]
        if free:
            free[0].kill("its place was needed")
            self._children.remove(free[0])
        return bool(free)


class ChildPlayer:
    """One session's place in a child."""

    def __init__(self, worker: str, child: Child, note: Callable[[str, float], None]) -> None:
        self._worker = worker
        self._child = child
        self._note = note
        self._session = ""
        child.come()

    async def open(self, request: OpenSession) -> SessionReply:
        self._session = request.session
        answer = await self._child.call("open", request)
        reply = self._checked(answer)
        if reply.failure is None:
            if not 0 < answer.cost < math.inf:
                return failure(self._worker, Ending.ENV_BAD_REPLY, f"cost must be above 0, not {answer.cost}")
            self._note(request.environment, answer.cost)
        return reply

    async def step(self, request: StepSession) -> SessionReply:
        return self._checked(await self._child.call("step", request))

    async def close(self) -> None:
        self._child.leave()
        try:
            await self._child.call("close", CloseSession(session=self._session))
        finally:
            self._child.retire()

    def _checked(self, answer: Answer) -> SessionReply:
        if self._child.key:
            return sound(answer.reply, self._worker, player=False)
        return on_worker(answer.reply, self._worker)


class Child:
    """`key`: whose sessions a sandboxed child plays, or which interpreter it runs; empty for one that plays what the
    operator wrote, by ours."""

    def __init__(self, start: Start, key: str = "") -> None:
        self.key = key
        self.sessions = 0
        self.leaving = False
        """It takes no new sessions: somebody else waits for its place."""
        self.spent = False
        """It takes no new sessions: it says that it should be replaced."""
        self.gone = ""
        """Why the child can no longer be used."""
        self._launch = start
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        """In the order in which the child plays them: the first is the one being played. Given-up calls stay in."""
        self._unsent: list[bytes] = []
        """Calls made before the process was up."""
        self._process: Running | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    def come(self) -> None:
        self.sessions += 1
        if self._idle is not None:
            self._idle.cancel()

    def leave(self) -> None:
        self.sessions -= 1
        if self.key and self.sessions == 0:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.kill, "nobody needed it any more")

    def retire(self) -> None:
        """After a session was closed: a spent child ends with its last one."""
        if self.spent and not self.sessions and not self._waiting:
            self.kill("it was spent: recycle_after or memory_mb of what it played")

    async def call(self, verb: str, body: Any) -> Answer:
        """Play one call. If it is cancelled while the child is busy with it, the child is killed."""
        if self.gone:
            return Answer(0, failure("", Ending.ENV_ERROR, f"the environment's process is gone: {self.gone}"))
        serial = self._serial = self._serial + 1
        self._waiting[serial] = waiting = asyncio.get_running_loop().create_future()
        self._send(frame(Call(serial, verb, msgspec.Raw(codec.encode(body)))))
        try:
            answer: Answer = await waiting
        except asyncio.CancelledError:
            playing, oldest = next(iter(self._waiting.items()), (0, waiting))
            if playing == serial or (playing and oldest.cancelled()):
                self.kill(f"it was killed because {verb} did not return in time in one of its sessions")
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
        """From the start of the process to its end; every call that is left then gets an answer."""
        reason = ""
        try:
            reader = await self._start()
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > LARGEST:
                    raise codec.WireError(f"an answer of {size:,} bytes; at most {LARGEST:,} are taken")
                answer = codec.decode(Answer, await reader.readexactly(size))
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
        if self.gone:  # given up while it was starting
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
                waiting.set_result(Answer(0, failure("", Ending.ENV_ERROR, why)))

    async def _status(self, process: Running) -> int:
        try:
            async with asyncio.timeout(END_S):
                return await process.wait()
        except TimeoutError:
            process.kill("it closed its socket and went on")
            return await process.wait()


class Plain:
    """A child process of the level `process`, and whatever it starts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.reason = ""
        self._process = process

    def kill(self, reason: str) -> None:
        if self._process.returncode is None:
            self.reason = self.reason or reason
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        status = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        return status


async def _start(modules: bool, interpreter: str, python_path: str, descriptor: int) -> Plain:
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        interpreter,
        "-m",
        "opentinker.services.env_worker.child",
        str(descriptor),
        str(int(modules)),
        "",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=2,  # what user code prints goes to the log of the worker, never into the protocol
        pass_fds=[descriptor],
        env=variables,
        start_new_session=True,
    )
    return Plain(process)


def _wrong(name: str, problem: str) -> dict[str, Any]:
    return {"field": "environment.name", "value": name, "problem": problem}
