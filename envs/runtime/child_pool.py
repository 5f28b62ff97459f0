"""The child processes of an env worker, for blocking and untrusted environments: assigns sessions to children.

A child plays one environment of one job, so that jobs cannot disturb each other. A job gets a first child even if
others have all regular ones, and more while there are any. A session goes to its job's least busy child.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakSet

import msgspec

from opentinker.envs.registry import wrong_name
from opentinker.envs.runtime.child_process import EnvironmentChild, Start, start_plain
from opentinker.envs.runtime.child_protocol import ChildAnswer
from opentinker.envs.runtime.data_rows import sound_rows
from opentinker.envs.runtime.fair_queue import FairQueue
from opentinker.envs.runtime.interpreters import Interpreters
from opentinker.envs.runtime.resolver import CHECK_S
from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.shared.messaging.reply_validation import failure, late_import, sound, sound_check
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    CloseSession,
    EnvCheck,
    EnvCheckReply,
    EnvRows,
    EnvRowsReply,
    OpenSession,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.errors import SpecError

CHECKS = 2
"""Concurrent checks; more wait."""
ROWS_S = 30.0
"""Time limit for importing an environment and reading its rows; less than the scheduler waits."""
COSTS = 1000
"""Number of environments whose cost is cached."""
SPARE = 4
"""Largest number of children as a multiple of `children`. Each beyond `children` is the first of its job and
environment."""


class ChildPool:
    """`children` processes with `per_child` sessions each, started when first needed; and a first one for every job and
    environment, `SPARE` times as many in all. `rehearsal_s`: time limit for building what an episode plays, at
    submission: with the steps before it, below what the scheduler waits."""

    def __init__(
        self,
        *,
        children: int,
        per_child: int,
        modules: bool,
        sandboxes: Sandboxes | None = None,
        interpreters: Interpreters | None = None,
        rehearsal_s: float = 4.0,
    ) -> None:
        self.interpreters = interpreters or Interpreters({})
        self._limit = children
        self._spare = SPARE
        self._per_child = per_child
        self._rehearsal_s = rehearsal_s
        self._modules = modules
        self._sandboxes = sandboxes
        self._children: list[EnvironmentChild] = []
        self._running: WeakSet[EnvironmentChild] = WeakSet()
        """All children, including killed ones that have not ended yet."""
        self._turns = FairQueue()
        self._checks = asyncio.Semaphore(CHECKS)
        self._costs: dict[str, float] = {}

    @property
    def has_children(self) -> bool:
        return self._limit > 0

    def cost(self, environment: str) -> float:
        """Return the cost of a session as its child has reported it; 1 before that."""
        return self._costs.get(environment, 1.0)

    def runner(self, worker: str, request: OpenSession) -> ChildEnvRunner | None:
        """Return a place in a child of the session's environment and job, or None if all are taken."""
        key = f"{request.environment} of {request.job}, not isolated"
        checked = bool(self.interpreters.of(request.environment))
        return self._place(worker, key, self._starter(request.environment), checked=checked)

    def _starter(self, environment: str) -> Start:
        """Return how to start a plain child, by this interpreter or the environment's."""
        interpreter = self.interpreters.of(environment)
        if not interpreter:
            return partial(start_plain, self._modules, sys.executable, os.pathsep.join(filter(None, sys.path)))
        return partial(start_plain, self._modules, interpreter, self.interpreters.python_path)

    async def sandboxed(self, worker: str, request: OpenSession) -> ChildEnvRunner | None:
        """Return a place in a sandboxed child of the session's environment and job, or None if all are taken. Raise
        SpecError if sandboxes are unavailable here."""
        sandboxes = self._with_sandboxes()
        program = await sandboxes.program(request.environment)
        key = f"{request.environment} of {request.job}"
        return self._place(worker, key, partial(sandboxes.start, program), checked=True)

    async def check(self, request: EnvCheck) -> EnvCheckReply:
        """Check in a separate child, sandboxed if its sessions are.

        Raise SpecError if no such child can be started here.
        """
        async with self._trial(request) as child:
            try:
                async with asyncio.timeout(CHECK_S):
                    answer = await child.call("check", request)
                if not answer.errors and answer.reply.failure is None and request.config is not None:
                    answer = await _rehearse(child, request, self._rehearsal_s)
            except TimeoutError:
                problem = f"importing it and checking its config took more than {CHECK_S:g} s"
                return EnvCheckReply(errors=wrong_name(request.name, problem).mistakes)
        if answer.reply.failure is not None:
            problem = sound(answer.reply, "", player=False).error
            return EnvCheckReply(errors=wrong_name(request.name, problem).mistakes)
        return sound_check(answer.errors, answer.seats, answer.about)

    async def rows(self, request: EnvRows) -> EnvRowsReply:
        """List rows in a separate child, sandboxed if sessions are. Raise SpecError if no such child can be started
        here."""
        async with self._trial(request) as child:
            try:
                async with asyncio.timeout(ROWS_S):
                    answer = await child.call("rows", request)
            except TimeoutError:
                return EnvRowsReply(problem=f"importing it and reading its rows took more than {ROWS_S:g} s")
        if answer.reply.failure is not None:
            return EnvRowsReply(problem=sound(answer.reply, "", player=False).error)
        return sound_rows(answer.rows, request)

    @asynccontextmanager
    async def _trial(self, request: EnvCheck) -> AsyncIterator[EnvironmentChild]:
        """Give a separate child for one question, sandboxed if sessions are. Raise SpecError if no such child can be
        started here."""
        if request.isolation == "process":
            start = self._starter(request.name)
        else:
            sandboxes = self._with_sandboxes()
            start = partial(sandboxes.start, await sandboxes.program(request.name))
        async with self._checks:
            child = EnvironmentChild(start, "check", checked=True)
            try:
                yield child
            finally:
                child.kill("the check is over")
                await child.ended()

    async def close(self) -> None:
        for child in self._children:
            child.kill("the env worker is stopping")
        await asyncio.gather(*(child.ended() for child in self._running))
        self.interpreters.close()

    def _with_sandboxes(self) -> Sandboxes:
        if self._sandboxes is None:
            raise SpecError.of("environment.isolation", "sandbox", "is not available here")
        return self._sandboxes

    def _place(self, worker: str, key: str, start: Start, *, checked: bool) -> ChildEnvRunner | None:
        now = asyncio.get_running_loop().time()
        self._children = [child for child in self._children if not child.gone]
        due = self._turns.due(now)
        self._reserve_child(due)
        own = [child for child in self._children if child.key == key and not child.leaving and not child.spent]
        least = min(own, key=lambda child: child.sessions, default=None)
        if (least is None or least.sessions > 0) and self._has_room(key, due):
            least = EnvironmentChild(start, key, checked=checked)
            self._children.append(least)
            self._running.add(least)
        if least is None or least.sessions >= self._per_child:
            if not own:
                self._turns.refused(key, now)
            return None
        self._turns.placed(key)
        return ChildEnvRunner(worker, least, self._note_cost)

    def _note_cost(self, environment: str, cost: float) -> None:
        if len(self._costs) >= COSTS:
            self._costs.clear()
        self._costs[environment] = cost

    def _reserve_child(self, due: str | None) -> None:
        """Stop new sessions in one child while another key is due: the oldest child of the key with most children."""
        if due is None:
            for child in self._children:
                child.leaving = False
        elif len(self._children) >= self._limit and not any(child.leaving for child in self._children):
            count = Counter(child.key for child in self._children)
            max(self._children, key=lambda child: count[child.key]).leaving = True  # the oldest

    def _has_room(self, key: str, due: str | None) -> bool:
        """Return whether one more child may start, ending an idle one of another key if needed. First children do not
        wait for others to become idle while there are spare ones."""
        count = len(self._children)
        if count < self._limit:
            return True
        first = all(child.key != key for child in self._children)
        free = [child for child in self._children if child.sessions == 0 and (not child.leaving or key == due)]
        if free and (first or count <= self._limit):
            free[0].kill("its place was needed")
            self._children.remove(free[0])
            return True
        return first and count < self._limit * self._spare


class ChildEnvRunner:
    """One session's place in a child."""

    def __init__(self, worker: str, child: EnvironmentChild, note: Callable[[str, float], None]) -> None:
        self._worker = worker
        self._child = child
        self._note = note
        self._session = ""
        child.come()

    async def prepare(self, request: OpenSession, within_s: float) -> SessionReply | None:
        """Import the environment if the child has not yet. Return the failure, if any."""
        answer = await self._child.prepare(request, within_s)
        if answer is None:
            return late_import(self._worker, within_s)
        reply = self._validate(answer)
        return None if reply.failure is None else reply

    async def open(self, request: OpenSession) -> SessionReply:
        self._session = request.session
        answer = await self._child.call("open", request)
        reply = self._validate(answer)
        if reply.failure is None:
            if not 0 < answer.cost < math.inf:
                return failure(self._worker, Ending.ENV_BAD_REPLY, f"cost must be above 0, not {answer.cost}")
            self._note(request.environment, answer.cost)
        return reply

    async def step(self, request: StepSession) -> SessionReply:
        return self._validate(await self._child.call("step", request))

    async def close(self) -> None:
        self._child.leave()
        try:
            if self._session:
                await self._child.call("close", CloseSession(session=self._session))
        finally:
            self._child.retire()

    def _validate(self, answer: ChildAnswer) -> SessionReply:
        if self._child.checked:
            return sound(answer.reply, self._worker, player=False)
        return msgspec.structs.replace(answer.reply, worker=self._worker)


async def _rehearse(child: EnvironmentChild, request: EnvCheck, within_s: float) -> ChildAnswer:
    """Build what an episode plays and return the answer. Exceeding the time limit is no mistake."""
    try:
        async with asyncio.timeout(within_s):
            return await child.call("rehearse", request)
    except TimeoutError:
        return ChildAnswer(0, SessionReply(worker=""))
