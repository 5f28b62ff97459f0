"""Represents a process that serves an environment, in the scheduler that holds its connection.

(new) --a Hello comes--> expected --Welcome--> there     expected --its connection breaks first--> away
there --connection breaks--> away --it connects again--> there      (turns wait until then)
away --away_s--> gone        there --it says goodbye--> gone        (turns are answered: lost)
any --another scheduler has it--> gone                              (turns are left to that one)

Connections come and go while subscriptions are being made and removed. So the state changes immediately, and
`_sync_subscriptions` adjusts the subscriptions one by one; a process that is gone is forgotten immediately and never
revived: the next Hello makes another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import nats.errors
import structlog
from aiohttp import WSCloseCode, web
from nats.aio.subscription import Subscription

from opentinker.shared.messaging.reply_validation import late_import, sound, sound_check
from opentinker.shared.messaging.subjects import ENV_CLOSE, ENV_STEP, SERVED_BACK, SERVED_CHECK, SERVED_OPEN
from opentinker.shared.messaging.websocket_frames import Asker, ConnectionLost, Hello
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    IMPORTED,
    CloseSession,
    EnvCheck,
    EnvCheckReply,
    OpenSession,
    ServedBack,
    SessionReply,
    StepSession,
)  # fmt: skip
from opentinker.shared.types.errors import OpenTinkerError

QUEUE = "env"
LATE_S = 5.0
"""After the episode's deadline, which the process keeps itself."""
UNKNOWN_S = 3600.0
"""For a session that was opened through another scheduler."""
CHECK_S = 10.0
TENANTS = 1000
OTHER_TENANT = "the environment is served by another tenant than that of the job"

log = structlog.get_logger()


class Gone(OpenTinkerError):
    """The process is not coming back."""


class ServedProcess:
    """`forget(address)` is called when the process is gone."""

    def __init__(
        self,
        ctx: Context,
        address: str,
        environment: str,
        tenant: str,
        forget: Callable[[str, None], Any],
        away_s: float,
    ) -> None:
        self.address, self.environment, self.tenant = address, environment, tenant
        self.hello: Hello
        self.gone = False
        self._ctx, self._forget, self._away_s = ctx, forget, away_s
        self._holder = uuid.uuid4().hex
        self._coming = 0
        """Connections that have sent Hello and are neither established nor closed."""
        self._asker: Asker | None = None
        self._socket: web.WebSocketResponse | None = None
        self._next_asker: asyncio.Future[Asker] = asyncio.get_running_loop().create_future()
        """While it is away: its next connection, or Gone."""
        self._timer: asyncio.TimerHandle | None = None
        self._sync_lock = asyncio.Lock()
        self._at_address: list[Subscription] = []
        self._at_name: list[Subscription] = []
        self._deadlines: dict[str, float] = {}
        """Deadlines of its sessions."""
        self._imports: dict[str, float] = {}
        """Deadlines of imports that its sessions wait for."""
        self._steps: dict[tuple[str, int], asyncio.Task[SessionReply]] = {}
        """Being asked: who repeats a turn waits with those who asked before."""
        self._background: set[asyncio.Task[Any]] = set()
        self._tenants: dict[str, str] = {}
        """Tenants of jobs."""

    @property
    def connected(self) -> bool:
        return self._asker is not None

    @property
    def sessions(self) -> int:
        return len(self._deadlines)

    # --- its connections ----------------------------------------------------------------------------------------

    def claim(self, hello: Hello) -> None:
        """A connection is about to come: from here on `attach` or `abandon` must follow."""
        self.hello = hello
        self._coming += 1
        self._cancel_timer()

    async def take_over(self) -> None:
        """Take over from who had the last one, and take requests."""
        await self._sync_subscriptions()
        await self._ctx.bus.emit(SERVED_BACK, ServedBack(self._holder), worker=self.address)
        await self._ctx.bus.flush()  # from here on the server sends us requests

    def attach(self, asker: Asker, socket: web.WebSocketResponse) -> None:
        """Ask here from now on. An older connection that has not ended yet is dropped."""
        self._coming -= 1
        if self._socket is not None:
            self._close(self._socket)
        self._asker, self._socket = asker, socket
        if not self._next_asker.done():
            self._next_asker.set_result(asker)

    async def abandon(self) -> None:
        """The connection that was to come has ended before."""
        self._coming -= 1
        self._wait_if_away()
        await self._sync_subscriptions()

    async def detach(self, asker: Asker, *, for_good: bool) -> None:
        """The connection has ended."""
        self._mark_away(asker)
        if for_good and self._asker is None and not self._coming:
            self._end(Gone("the process that served it has stopped"))
        await self._sync_subscriptions()

    async def release(self) -> None:
        """Leave it to the scheduler to which it connects next."""
        self._end(None)
        await self._sync_subscriptions()

    async def _is_elsewhere(self, back: ServedBack) -> None:
        if back.holder != self._holder and not self.gone:
            log.info("served_environment_moved", worker=self.address)
            await self.release()

    def _mark_away(self, asker: Asker) -> None:
        if self._asker is not asker:
            return
        self._asker = self._socket = None
        self._next_asker = asyncio.get_running_loop().create_future()
        self._wait_if_away()

    def _wait_if_away(self) -> None:
        """Mark a process without a connection as away, and wait for it for `away_s`."""
        if self._asker is None and not self._coming and not self.gone and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._away_s, self._expire)

    def _expire(self) -> None:
        self._end(Gone(f"the process that served it has been away for {self._away_s:g} s"))
        self._run_in_background(self._sync_subscriptions())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, why: Gone | None) -> None:
        """Fail waiting turns with the reason; without one they stay unanswered, because another scheduler answers
        them."""
        if self.gone:
            return
        self.gone = True
        self._forget(self.address, None)
        self._cancel_timer()
        if self._socket is not None:
            self._close(self._socket)
        self._asker = self._socket = None
        if why is None:
            for step in self._steps.values():
                step.cancel()
        if self._next_asker.done():
            self._next_asker = asyncio.get_running_loop().create_future()
        self._next_asker.set_exception(why or Gone("it is served by another scheduler now"))
        self._next_asker.exception()  # retrieved, because no caller may be waiting

    def _close(self, socket: web.WebSocketResponse) -> None:
        self._run_in_background(socket.close(code=WSCloseCode.GOING_AWAY))

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _sync_subscriptions(self) -> None:
        """Take the requests that the state asks for. Who changes the state calls this afterwards, so the last call of
        all sees the last state."""
        bus = self._ctx.bus
        keys = {"tenant": self.tenant, "environment": self.environment}
        async with self._sync_lock:
            if not self.gone and not self._at_address:
                async with _all_or_none(self._at_address) as made:
                    made.append(await bus.serve(ENV_STEP, self.step, worker=self.address))
                    made.append(await bus.serve(ENV_CLOSE, self.close, worker=self.address))
                    made.append(await bus.listen(SERVED_BACK, self._is_elsewhere, worker=self.address))
            if self._accepts_opens and not self._at_name:
                async with _all_or_none(self._at_name) as made:
                    made.append(await bus.serve(SERVED_OPEN, self.open, QUEUE, **keys))
                    made.append(await bus.serve(SERVED_CHECK, self.check, QUEUE, **keys))
            if not self._accepts_opens:
                await _unsubscribe(self._at_name)
            if self.gone:
                await _unsubscribe(self._at_address)

    @property
    def _accepts_opens(self) -> bool:
        """Return whether opens are to come here."""
        return not self.gone and (self._asker is not None or self._coming > 0)

    # --- what rollout workers ask -------------------------------------------------------------------------------

    async def open(self, request: OpenSession) -> SessionReply:
        if await self._tenant_of(request.job) != self.tenant:
            return SessionReply(worker=self.address, failure=Ending.ENV_ERROR, error=OTHER_TENANT)
        asker = self._asker
        if asker is None:
            return SessionReply(worker=self.address, busy=True)
        self._deadlines[request.session] = asyncio.get_running_loop().time() + request.deadline_s
        try:
            async with asyncio.timeout(request.answer_within_s + LATE_S):
                reply = sound(await asker.ask("open", request, SessionReply), self.address)
        except (ConnectionLost, TimeoutError):
            reply = SessionReply(worker=self.address, busy=True)
        except WireError as error:
            reply = SessionReply(worker=self.address, failure=Ending.ENV_BAD_REPLY, error=str(error))
        if reply.opening and reply.importing_s > 0.0:
            reply = self._import(request.session, reply)
        self._forget_ended(request.session, reply)
        return reply

    def _import(self, session: str, reply: SessionReply) -> SessionReply:
        """The reply, with the operator's deadline for the import; the episode's own begins after it."""
        within_s = min(reply.importing_s, self._ctx.settings.env_import_timeout_s)
        if session in self._deadlines:  # else it was closed in the meantime
            self._imports[session] = asyncio.get_running_loop().time() + within_s
            self._deadlines[session] += within_s
        return msgspec.structs.replace(reply, importing_s=within_s)

    async def step(self, request: StepSession) -> SessionReply:
        key = (request.session, request.turn)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = asyncio.get_running_loop().create_task(self._step(request))
            step.add_done_callback(lambda _: self._steps.pop(key, None))
        return await asyncio.shield(step)

    async def _step(self, request: StepSession) -> SessionReply:
        loop = asyncio.get_running_loop()
        until = self._deadlines.setdefault(request.session, loop.time() + UNKNOWN_S) + LATE_S
        limit_s = self._ctx.settings.env_import_timeout_s
        if request.turn == IMPORTED:
            until = self._imports.get(request.session, loop.time() + limit_s)
        try:
            async with asyncio.timeout_at(until):
                reply = await self._played(request)
        except TimeoutError:
            if request.turn == IMPORTED:
                self._run_in_background(self.close(CloseSession(session=request.session)))
                return late_import(self.address, limit_s)
            reply = self._failed(Ending.ENV_TIMEOUT, "the process that serves it did not answer in time")
        except Gone as error:
            reply = self._failed(Ending.ENV_LOST, str(error))
        except WireError as error:
            reply = self._failed(Ending.ENV_BAD_REPLY, str(error))
        self._forget_ended(request.session, reply)
        return reply

    async def _played(self, request: StepSession) -> SessionReply:
        """Asked on one connection after the other."""
        while True:
            asker = self._asker
            if asker is None:
                asker = await asyncio.shield(self._next_asker)
            try:
                reply = sound(await asker.ask("step", request, SessionReply), self.address)
            except ConnectionLost:
                self._mark_away(asker)
                continue
            if reply.opening and request.turn == IMPORTED:
                return msgspec.structs.replace(reply, importing_s=0.0)
            if reply.busy or reply.opening:
                return self._failed(Ending.ENV_BAD_REPLY, "a turn was answered like an open: busy, or still opening")
            return reply

    async def close(self, request: CloseSession) -> SessionReply:
        self._forget_session(request.session)
        if self._asker is not None:
            try:
                async with asyncio.timeout(LATE_S):
                    await self._asker.ask("close", request, SessionReply)
            except (ConnectionLost, TimeoutError, WireError) as error:
                log.info("served_session_not_closed", episode=request.session, reason=str(error))
        return SessionReply(worker=self.address)

    async def check(self, request: EnvCheck) -> EnvCheckReply:
        try:
            if self._asker is None:
                raise ConnectionLost("it has just left")
            async with asyncio.timeout(CHECK_S):
                answer = await self._asker.ask("check", request, EnvCheckReply)
                return sound_check(answer.errors, answer.seats, answer.about)
        except (ConnectionLost, TimeoutError, WireError) as error:
            why = str(error) or f"no answer within {CHECK_S:g} s"
            problem = f"the process that serves it could not say whether it would start: {why}"
            return EnvCheckReply(errors=[{"field": "environment.name", "value": request.name, "problem": problem}])

    # --- book-keeping -------------------------------------------------------------------------------------------

    def _failed(self, ending: Ending, error: str) -> SessionReply:
        return SessionReply(worker=self.address, failure=ending, error=error)

    def _forget_ended(self, session: str, reply: SessionReply) -> None:
        """Forget a session that has ended, and those that were not closed."""
        if reply.done or reply.busy or reply.failure is not None:
            self._forget_session(session)
        first = next(iter(self._deadlines), None)
        if first is not None and self._deadlines[first] + LATE_S < asyncio.get_running_loop().time():
            self._forget_session(first)

    def _forget_session(self, session: str) -> None:
        self._deadlines.pop(session, None)
        self._imports.pop(session, None)

    async def _tenant_of(self, job: str) -> str:
        if job not in self._tenants:
            found = await self._ctx.store.jobs([job])
            if not found:
                return ""
            if len(self._tenants) >= TENANTS:
                self._tenants.clear()
            self._tenants[job] = found[0].tenant
        return self._tenants[job]


@asynccontextmanager
async def _all_or_none(subscriptions: list[Subscription]) -> AsyncIterator[list[Subscription]]:
    try:
        yield subscriptions
    except BaseException:
        await _unsubscribe(subscriptions)
        raise


async def _unsubscribe(subscriptions: list[Subscription]) -> None:
    while subscriptions:
        with contextlib.suppress(nats.errors.Error):  # the connection is gone, and with it all of them
            await subscriptions.pop().unsubscribe()
