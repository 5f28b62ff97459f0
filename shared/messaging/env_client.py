"""The rollout worker's side of a session: every call ends in a SessionReply, failures included.

An open goes to any env worker, stands in line there for a moment if that one is full, and is repeated while all are
full or none is there; a worker whose environment takes its time to open says so, and is then the only one that is
asked. Steps go to the worker that holds the session and are repeated while nothing comes back: a repeated turn is
answered from memory, so asking again is how a lost message, a restarted NATS server and a slow environment are all
waited out. Only a worker that is gone is final.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import msgspec
import structlog

from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.bus import Bus, NoReply, NoResponders
from opentinker.shared.messaging.subjects import ENV_CLOSE, ENV_OPEN, ENV_STEP, SANDBOX_OPEN, SERVED_OPEN, Call
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Ending, StopReason
from opentinker.shared.types.env_protocol import (
    AWAY_S,
    IMPORTED,
    MAX_IMPORT_S,
    OPEN,
    REMOTE,
    SERVED,
    SERVED_WORKER,
    CloseSession,
    Isolation,
    OpenSession,
    SessionReply,
    StepSession,
    is_url,
)

log = structlog.get_logger()
OPENING_S = 2.5
"""An open that takes longer is reported: a caller that gives up then knows where to close it, and those of a cancelled
job are gone within its 5 s."""
MAX_PENDING = 256
"""Opens that one client has not been answered yet: large groups open in portions."""
LATE_S = 2.0
"""An env worker's own deadline comes first: its words say what was late."""
IN_LINE_S = 2.0
"""At one full env worker, before another is asked: a place there is taken the moment it is free."""


class EnvClient:
    """Client for any number of concurrent episodes."""

    def __init__(
        self,
        bus: Bus,
        *,
        tenant: str = "default",
        owner: str = "",
        own_jobs: Collection[str] = (),
        ask_s: float = 10.0,
        gone_s: float = 1.5,
    ) -> None:
        """`owner`, `own_jobs`: see OpenSession."""
        self._bus = bus
        self._own_jobs = sorted(own_jobs)
        self._asking = asyncio.Semaphore(MAX_PENDING)
        self._owner = owner
        self._tenant = tenant
        """Tenant of the jobs whose episodes are played: environments that its users serve are visible to it alone."""
        self._ask_s = ask_s
        """How long to wait for a reply before asking again."""
        self._gone_s = gone_s
        """A worker whose address has had no subscriber for this time is gone; a shorter gap may be its reconnect to
        NATS."""
        self._given_up: set[asyncio.Task[None]] = set()
        """Opens whose caller is gone, until it is known what they came to."""

    async def open(
        self, request: OpenSession, importing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> SessionReply:
        """Gives up a little before the deadline, with the reason why no session could be had.

        `request`: with the time that all tries have together; owner and own jobs are the client's, and so is how long
        to wait for each answer. `importing`: around the import of the environment, which does not count; its deadline
        is the env worker's.
        """
        deadline = time.monotonic() + request.deadline_s
        give_up = deadline - min(1.0, 0.1 * request.deadline_s)
        backoff, why = Backoff(0.02, 1.0, factor=1.5), "no env worker answered in time"
        call, keys, nobody = self._way(request.environment, request.isolation)
        imported_s = 0.0
        while (now := time.monotonic()) < give_up:
            within_s = 0.0
            try:
                async with self._asking:
                    now = time.monotonic()
                    within_s = max(0.0, min(self._ask_s, give_up - now))
                    room_s = min(IN_LINE_S, 0.25 * self._ask_s, max(0.0, 0.5 * (give_up - now)))
                    request = msgspec.structs.replace(
                        request,
                        deadline_s=deadline - now + request.pauses_s,
                        room_within_s=room_s,
                        answer_within_s=min(OPENING_S, 0.5 * within_s),
                        own_jobs=self._own_jobs,
                        owner=self._owner,
                    )
                    reply = await self._ask(call, request, within_s, keys)
                reply, took_s = await self._opened(
                    reply, request.session, give_up, MAX_IMPORT_S - imported_s, importing
                )
                imported_s, deadline, give_up = imported_s + took_s, deadline + took_s, give_up + took_s
                if reply.failure != Ending.ENV_LOST and not reply.busy:
                    return reply
                why = "all env workers are full" if reply.busy else reply.error
            except NoResponders:
                why = nobody
            except NoReply:
                if within_s == self._ask_s:  # the last ask may be too short to say anything
                    why = f"no env worker answered within {within_s:.1f} s"
            except WireError as error:
                return _failed("", Ending.ENV_BAD_REPLY, str(error))
            await asyncio.sleep(now + backoff.delay_s() - time.monotonic())
        return _failed("", Ending.ENV_LOST, f"environment {request.environment!r} could not be opened: {why}")

    async def _ask(
        self, call: Call[OpenSession, SessionReply], request: OpenSession, within_s: float, keys: dict[str, str]
    ) -> SessionReply:
        """Send a session request. A caller that is cancelled in between leaves no session behind."""
        asking = asyncio.create_task(self._bus.request(call, request, within_s, **keys))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._close_unasked(asking, request.session))
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
            raise

    async def _close_unasked(self, asking: asyncio.Task[SessionReply], session: str) -> None:
        try:
            reply = await asking
        except (NoReply, WireError):
            return
        if reply.failure is None and not reply.busy:
            await self.close(worker=reply.worker, session=session)

    def _way(
        self, environment: str, isolation: Isolation
    ) -> tuple[Call[OpenSession, SessionReply], dict[str, str], str]:
        """Return the call and subject keys for opening a session, and the error if no process answers."""
        if environment.startswith(SERVED):
            keys = {"tenant": self._tenant, "environment": environment}
            return SERVED_OPEN, keys, "its user does not serve it now"
        if isolation == "sandbox":
            return SANDBOX_OPEN, {}, "no env worker has sandboxes"
        name = REMOTE if is_url(environment) else environment
        return ENV_OPEN, {"environment": name}, "no env worker serves it"

    async def _opened(
        self,
        reply: SessionReply,
        session: str,
        give_up: float,
        import_s: float,
        importing: Callable[[], AbstractContextManager[object]],
    ) -> tuple[SessionReply, float]:
        """The result of an open whose first answer is `reply`, and the seconds that imports took, `import_s` at most.
        An import is waited for inside `importing`, and `give_up` moves by its length."""
        took_s = 0.0
        while reply.opening:
            if reply.importing_s <= 0.0:
                reply = await self._outcome(reply.worker, session, OPEN, give_up + took_s - time.monotonic())
                continue
            began = time.monotonic()
            with importing():
                within_s = max(0.0, min(reply.importing_s + LATE_S, import_s - took_s))
                reply = await self._outcome(reply.worker, session, IMPORTED, within_s)
            took_s += time.monotonic() - began
        return reply, took_s

    async def _outcome(self, worker: str, session: str, turn: int, within_s: float) -> SessionReply:
        """Wait for the result of an open, or of the import before it, on the worker that has started it; a session that
        is given up is closed there."""
        try:
            async with asyncio.timeout(within_s):
                return await self.step(worker, StepSession(session=session, turn=turn, text="", stop=StopReason.EOS))
        except TimeoutError:
            await self.close(worker=worker, session=session)
            return _failed(worker, Ending.ENV_LOST, f"{worker} did not open it within {within_s:.1f} s")
        except asyncio.CancelledError:
            await self.close(worker=worker, session=session)
            raise

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        """Waits as long as the worker is there; the caller's deadline, and the worker's own, bound it."""
        gone_since: float | None = None
        gone_s = max(self._gone_s, AWAY_S) if worker.startswith(SERVED_WORKER) else self._gone_s
        while True:
            try:
                return await self._bus.request(ENV_STEP, request, self._ask_s, worker=worker)
            except NoResponders:
                now = time.monotonic()
                gone_since = gone_since or now
                if now - gone_since > gone_s:
                    return _failed(worker, Ending.ENV_LOST, f"env worker {worker} is gone")
                await asyncio.sleep(0.1)
            except NoReply as error:
                gone_since = None
                log.info("step_retried", episode=request.session, turn=request.turn, reason=str(error))
                await asyncio.sleep(0.1)
            except WireError as error:
                return _failed(worker, Ending.ENV_BAD_REPLY, str(error))

    async def close(self, *, worker: str, session: str) -> None:
        """Close a session, best effort: a session that is not closed ends with its owner or at its deadline."""
        try:
            await self._bus.request(ENV_CLOSE, CloseSession(session=session), 1.0, worker=worker)
        except (NoReply, WireError) as error:
            log.info("session_not_closed", episode=session, reason=str(error))


def _failed(worker: str, ending: Ending, error: str) -> SessionReply:
    return SessionReply(worker=worker, failure=ending, error=error)
