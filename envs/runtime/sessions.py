"""The sessions of one env worker: open, step, close; exactly one answer per (session, turn). Transport-independent.

    importing --> opening --answer--> waiting <--step/answer--> playing
    opening --import behind a URL--> importing
    any of these --done | failure | deadline | close--> ended (its last answer is cached for a while)

A turn is played in a separate task and answered through a future, which repeated requests share. One timer per session
enforces the deadline, first that of the import, then the episode's, regardless of the environment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import structlog
from prometheus_client import Counter, Gauge

from opentinker.envs.runtime.child_pool import ChildEnvRunner, ChildPool
from opentinker.envs.runtime.env_runner import EnvRunner, LocalEnvRunner, guard_user_code
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.session import Session
from opentinker.envs.runtime.tools.tool_env_runner import ToolEnvRunner
from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.shared.messaging.reply_validation import failure, late_import
from opentinker.shared.runtime.telemetry import REGISTRY, Meters
from opentinker.shared.runtime.timeline import LanesByJob
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import IMPORTED, OPEN, CloseSession, OpenSession, SessionReply, StepSession

REMEMBER_S = 60.0
MAX_SESSION_S = 7 * 86400.0

log = structlog.get_logger()
ACTIVE = Gauge("opentinker_env_sessions", "Sessions now open", registry=REGISTRY)
STEPS = Counter("opentinker_env_steps", "Turns played", registry=REGISTRY)
LOAD = Gauge("opentinker_env_load", "What the open sessions cost together: env_sessions at most", registry=REGISTRY)
WAITING = Gauge("opentinker_env_waiting", "Episodes in line for a place at a full worker", registry=REGISTRY)
ENDED = Counter("opentinker_env_endings", "Sessions ended, by reason", ["reason"], registry=REGISTRY)


class Sessions:
    """`worker` is the address for steps; `limit` sessions of cost 1 run at a time. Further ones queue for the time
    given in each request and are then answered `busy`. `lanes`: timeline lanes for what is played, if recorded.
    `close_s`: time limit of closing an environment in the background. `remembered`: ended sessions whose last answer is
    repeated."""

    def __init__(
        self,
        worker: str,
        *,
        limit: int,
        resolver: Resolver,
        host: ChildPool | None = None,
        tool_factory: ToolFactory | None = None,
        lanes: LanesByJob | None = None,
        import_timeout_s: float = 120.0,
        close_s: float = 5.0,
        remembered: int = 4096,
    ) -> None:
        self.worker, self.limit = worker, limit
        self.active = 0
        self.load = 0.0
        """Total cost of the active sessions."""
        self.draining = False
        self.meters = Meters()
        self._resolver = resolver
        self._host = host
        self._tool_factory = tool_factory
        self._lanes = lanes
        self._import_timeout_s, self._close_s, self._remembered = import_timeout_s, close_s, remembered
        self._sessions: dict[str, Session] = {}
        self._ended: deque[tuple[float, Session]] = deque()
        self._queue: deque[tuple[OpenSession, float, asyncio.Future[Session | None]]] = deque()
        """Queued requests: the request, the end of its episode's time, and the session that it gets."""
        WAITING.set_function(self._queue.__len__)
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the three requests -------------------------------------------------------------------------------------

    async def open(self, request: OpenSession) -> SessionReply:
        """Answer within `answer_within_s`, so that a slow environment does not send the caller to another worker."""
        session = self._sessions.get(request.session)
        if session is None:
            session = await self._find_place(request)
        if session is None:
            return SessionReply(worker=self.worker, busy=True)
        await asyncio.wait([session.opened], timeout=request.answer_within_s)
        return self._answer_open(session)

    def _answer_open(self, session: Session) -> SessionReply:
        """Return the result of the open, or its progress."""
        if session.opened.done():
            return session.opened.result()
        assert session.timer is not None
        left_s = 0.0 if session.imported.done() else session.timer.when() - asyncio.get_running_loop().time()
        return SessionReply(worker=self.worker, opening=True, importing_s=max(0.0, left_s))

    async def _find_place(self, request: OpenSession) -> Session | None:
        """Begin the session as soon as there is room for it; return None if that takes too long."""
        if self.draining:
            return None
        if not self._queue and self.load < self.limit:
            return self._add(request)
        if request.room_within_s <= 0.0:
            return None
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Session | None] = loop.create_future()
        entry = (request, loop.time() + request.deadline_s, place)
        self._queue.append(entry)
        await asyncio.wait([place], timeout=request.room_within_s)
        if not place.done():
            self._queue.remove(entry)
            return self._sessions.get(request.session)
        return place.result()

    def _admit_waiting(self) -> None:
        """Give free places to the first requests in the queue."""
        while self._queue and not self.draining and self.load < self.limit:
            request, until, place = self._queue.popleft()
            left = msgspec.structs.replace(request, deadline_s=until - asyncio.get_running_loop().time())
            place.set_result(self._sessions.get(request.session) or self._add(left))

    def _add(self, request: OpenSession) -> Session:
        loop = asyncio.get_running_loop()
        session = self._sessions[request.session] = Session(request, loop.create_future())
        self.active += 1
        self.load += session.cost
        self._idle.clear()
        ACTIVE.set(self.active)
        LOAD.set(self.load)
        self.meters.of(request.job).gauges["env/sessions"] += 1
        session.timer = loop.call_later(self._import_timeout_s, self._expire, session)
        self._play(session, "open", guard_user_code(self.worker, self._begin(session)))
        return session

    async def step(self, request: StepSession) -> SessionReply:
        session = self._sessions.get(request.session)
        if session is None:
            return failure(self.worker, Ending.ENV_LOST, "no such session on this worker: it expired or was lost")
        if request.turn in (IMPORTED, OPEN):
            news = session.imported if request.turn == IMPORTED else session.importing
            either: list[asyncio.Future[Any]] = [session.opened, news]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return self._answer_open(session)
        if request.turn == session.turn:
            return await asyncio.shield(session.answer)
        if session.ended:
            return self._reject_ended(session)
        if request.turn != session.turn + 1 or not session.answer.done():
            expected = session.turn + 1 if session.answer.done() else f"the answer to turn {session.turn}"
            return failure(self.worker, Ending.ENV_ERROR, f"turn {request.turn} is out of order: expected {expected}")
        assert session.runner is not None
        session.turn = request.turn
        session.answer = asyncio.get_running_loop().create_future()
        STEPS.inc()
        self.meters.of(session.request.job).counts["env/steps"] += 1
        self._play(session, "turn", session.runner.step(request))
        return await asyncio.shield(session.answer)

    async def close(self, request: CloseSession) -> SessionReply:
        session = self._sessions.pop(request.session, None)
        if session is not None and not session.ended:
            if not session.answer.done():
                session.answer.set_result(failure(self.worker, Ending.CANCELLED, "the session was closed"))
            self._end(session, "closed")
        return SessionReply(worker=self.worker)

    def owners(self) -> set[str]:
        return {one.request.owner for one in self._sessions.values() if one.request.owner and not one.ended}

    async def abandon(self, owner: str) -> None:
        left = [one.request for one in self._sessions.values() if one.request.owner == owner and not one.ended]
        for request in left:
            await self.close(CloseSession(session=request.session))
        log.warning("owner_lost", owner=owner, sessions=len(left))

    # --- life of a session --------------------------------------------------------------------------------------

    async def _begin(self, session: Session) -> SessionReply:
        request = session.request
        runner = await self._find_runner(session)
        if runner is None:
            return SessionReply(worker=self.worker, busy=True)
        session.runner = runner
        if isinstance(runner, LocalEnvRunner):
            runner.importing = partial(self._stop_clock, session)
        if isinstance(runner, ChildEnvRunner) and (wrong := await runner.prepare(request, self._import_timeout_s)):
            return wrong
        self._start_clock(session)
        if request.tools:
            if self._tool_factory is None:
                return failure(self.worker, Ending.ENV_ERROR, "this env worker has no tools")
            session.runner = ToolEnvRunner(self.worker, runner, self._tool_factory, lambda: self.meters.of(request.job))
        reply = await session.runner.open(request)
        reports_cost = self._is_elsewhere(request) and reply.failure is None
        if reports_cost and not self._charge(session, self._known_cost(request)):
            return SessionReply(worker=self.worker, busy=True)
        return reply

    def _start_clock(self, session: Session) -> None:
        """Start the episode's clock, after its environment has been imported."""
        assert session.timer is not None
        session.timer.cancel()
        deadline_s = min(max(0.0, session.request.deadline_s), MAX_SESSION_S)
        session.timer = asyncio.get_running_loop().call_later(deadline_s, self._expire, session)
        session.imported.set_result(None)

    @contextmanager
    def _stop_clock(self, session: Session) -> Iterator[None]:
        """Stop the episode's clock and run the import's deadline, while a server behind a URL imports the
        environment."""
        assert session.timer is not None
        loop = asyncio.get_running_loop()
        left_s = session.timer.when() - loop.time()
        session.timer.cancel()
        session.timer = loop.call_later(self._import_timeout_s, self._expire, session)
        session.imported = loop.create_future()
        session.importing.set_result(None)
        try:
            yield
        finally:
            if not session.ended:
                session.timer.cancel()
                session.timer = loop.call_later(left_s, self._expire, session)
            session.importing = loop.create_future()
            session.imported.set_result(None)

    async def _find_runner(self, session: Session) -> EnvRunner | None:
        """Return the runner of a session; None if there is no room."""
        request = session.request
        if self._is_elsewhere(request):
            if not self._charge(session, self._known_cost(request)) or self._host is None:
                return None
            if request.isolation == "sandbox":
                return await self._host.sandboxed(self.worker, request)
            return self._runner(request, True)
        found = await self._resolver.find(request.environment)
        if not self._charge(session, found.cost):
            return None
        if not found.blocking:
            await self._resolver.prepare(request.environment, request.config)
        return self._runner(request, found.blocking)

    def _is_elsewhere(self, request: OpenSession) -> bool:
        """Return whether a sandbox or another interpreter plays it: it is then not imported here, and its child reports
        its cost."""
        return request.isolation == "sandbox" or (
            self._host is not None and bool(self._host.interpreters.of(request.environment))
        )

    def _known_cost(self, request: OpenSession) -> float:
        return 1.0 if self._host is None else self._host.cost(request.environment)

    def _runner(self, request: OpenSession, blocking: bool) -> EnvRunner | None:
        if not blocking:
            return LocalEnvRunner(self.worker, modules=self._resolver.modules)
        return None if self._host is None else self._host.runner(self.worker, request)

    def _charge(self, session: Session, cost: float) -> bool:
        """Return whether the worker has room for the session, and charge its cost. A session above the limit may run
        alone."""
        more = cost - session.cost
        if session.ended or (self.active > 1 and self.load + more > self.limit):
            return False
        self.load += more
        session.cost = cost
        if more < 0.0:
            self._admit_waiting()
        return True

    def _play(self, session: Session, kind: str, call: Coroutine[Any, Any, SessionReply]) -> None:
        session.task = asyncio.get_running_loop().create_task(call, name=session.title)
        session.task.add_done_callback(lambda task: self._finish_call(session, task))
        if self._lanes is not None:
            lanes = self._lanes.of(session.request.job)
            key = lanes.begin("env", kind)
            session.task.add_done_callback(lambda _: lanes.end(key))

    def _finish_call(self, session: Session, task: asyncio.Task[SessionReply]) -> None:
        if session.answer.done():  # the deadline or a close came first
            return
        if task.cancelled():
            reply = failure(self.worker, Ending.ENV_ERROR, "the environment raised CancelledError")
        else:
            reply = task.result()
        session.answer.set_result(reply)
        lost = session.turn == OPEN and reply.failure == Ending.ENV_LOST
        if reply.busy or lost:  # a repeated request opens it again
            del self._sessions[session.request.session]
            self._end(session, Ending.ENV_LOST if lost else "busy")
        elif reply.failure is not None:
            self._end(session, reply.failure)
        elif reply.done:
            self._end(session, "done")

    def _expire(self, session: Session) -> None:
        if session.ended:  # it was closed just before its clock was started
            return
        if not session.answer.done():
            session.answer.set_result(self._timeout_reply(session))
        self._end(session, Ending.ENV_TIMEOUT)

    def _end(self, session: Session, reason: str) -> None:
        """Free the slot now; the environment is closed in the background."""
        session.ended = reason
        assert session.timer is not None
        session.timer.cancel()
        self.active -= 1
        self.load = self.load - session.cost if self.active else 0.0
        ACTIVE.set(self.active)
        LOAD.set(self.load)
        ENDED.labels(str(reason)).inc()
        meter = self.meters.of(session.request.job)
        meter.gauges["env/sessions"] -= 1
        meter.counts[f"env/ended/{reason}"] += 1
        if self.active == 0:
            self._idle.set()
        if reason not in ("done", "closed", "busy"):
            reply = session.answer.result()
            log.warning(
                "session_failed",
                job=session.request.job,
                episode=session.request.session,
                environment=session.request.environment,
                turn=session.turn,
                reason=str(reason),
                error=reply.error,
            )
        task = asyncio.get_running_loop().create_task(self._close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._remember(session)
        self._admit_waiting()

    async def _close(self, session: Session) -> None:
        assert session.task is not None
        if not session.task.done():
            session.task.cancel()
            await asyncio.wait([session.task], timeout=self._close_s)
            if not session.task.done():
                log.warning(
                    "environment_ignores_cancellation", job=session.request.job, episode=session.request.session
                )
                await asyncio.wait([session.task])  # its place is occupied until then
        if session.runner is None:
            return
        closing = asyncio.get_running_loop().create_task(session.runner.close(), name=session.title)
        await asyncio.wait([closing], timeout=self._close_s)
        if not closing.done():
            closing.cancel()
            log.warning("environment_close_timeout", job=session.request.job, episode=session.request.session)

    def _remember(self, session: Session) -> None:
        now = asyncio.get_running_loop().time()
        self._ended.append((now, session))
        while len(self._ended) > self._remembered or self._ended[0][0] < now - REMEMBER_S:
            _, old = self._ended.popleft()
            if self._sessions.get(old.request.session) is old:
                del self._sessions[old.request.session]

    def _reject_ended(self, session: Session) -> SessionReply:
        if session.ended == Ending.ENV_TIMEOUT:
            return self._timeout_reply(session)
        return failure(self.worker, Ending.ENV_ERROR, f"the session has ended ({session.ended}); it takes no turns")

    def _timeout_reply(self, session: Session) -> SessionReply:
        if not session.imported.done():
            return late_import(self.worker, self._import_timeout_s)
        what = "open" if session.turn == OPEN else f"turn {session.turn}"
        text = f"the episode's {session.request.deadline_s:g} s were over (last request: {what})"
        return failure(self.worker, Ending.ENV_TIMEOUT, text)

    # --- end of the process -------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Take no new sessions and wait for the running ones. Return the number of sessions still open at the end."""
        self.draining = True
        for _, _, place in self._queue:
            place.set_result(None)
        self._queue.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain_timeout", sessions=self.active)
        left = [session for session in self._sessions.values() if not session.ended]
        for session in left:
            await self.close(CloseSession(session=session.request.session))
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._close_s)
        return len(left)
