"""The `python` tool in pydantic-monty: an interpreter without an operating system, in separate processes.

A program has no files, no network and only a few modules of the standard library. The interpreter limits its time and
memory; if that fails, the process is killed. Variables of an episode's programs are kept as bytes between its calls: a
process waits for the next call of its episode, but plays for another one once all processes are needed, so no episode
waits for another.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from opentinker.envs.tools import RESULT_BYTES, ToolError, ToolFailed, offer
from opentinker.shared.spec.tools import ToolSpec

if TYPE_CHECKING:
    from pydantic_monty import AsyncMonty, AsyncMontySession

PRINTED_BYTES = 5 * RESULT_BYTES
STATE_BYTES = 1 << 20
"""Largest size of the variables of one episode."""
POLICY: Any = {"sleep": "zero", "random_start": {"seed": 0}}
"""Settings that make programs reproducible and never wait."""
OVERSPENT = "suspension limit"
"""Message for a program that has made too many host calls; the interpreter counts them per process."""


class MontyInterpreters:
    """The processes, shared by all episodes of an env worker. They are started when first needed."""

    broken = False

    def __init__(self, pool: AsyncMonty, most: int) -> None:
        self.pool = pool
        self._most = most
        self._turns = asyncio.Semaphore(most)
        self.held = 0
        """Processes that run a program or wait for one."""
        self._waiting: dict[MontySession, AsyncMontySession] = {}
        """Processes kept for the next call of their last user, longest unused first."""

    @classmethod
    async def open(cls) -> MontyInterpreters:
        from pydantic_monty import AsyncMonty

        most = os.cpu_count() or 1
        pool = AsyncMonty(min_processes=1, max_processes=most, max_checkouts_per_worker=1000)
        await pool.__aenter__()
        return cls(pool, most)

    @asynccontextmanager
    async def process(self, session: MontySession, *, fresh: bool) -> AsyncIterator[AsyncMontySession]:
        """Borrow a process with the session's variables. One in which something failed is not reused."""
        async with self._turns:
            one = self._waiting.pop(session, None)
            if one is not None and fresh:
                await self._end(one)
                one = None
            if one is None:
                one = await self._another(session)
            try:
                yield one
            except BaseException:
                await self._end(one)
                raise
            if session.closed or session in self._waiting:
                await self._end(one)
            else:
                self._waiting[session] = one

    async def _another(self, session: MontySession) -> AsyncMontySession:
        if self.held >= self._most and self._waiting:  # otherwise one is about to be returned
            await self._end(self._waiting.pop(next(iter(self._waiting))))
        self.held += 1
        one = self.pool.checkout(limits=session.limits, os_policy=POLICY)
        try:
            await one.__aenter__()
        except BaseException:
            self.held -= 1
            raise
        if session.state is not None:
            try:
                await one.load_session(session.state)
            except BaseException:
                await self._end(one)
                raise
        return one

    async def _end(self, one: AsyncMontySession) -> None:
        try:
            await one.__aexit__(None, None, None)
        finally:
            self.held -= 1

    def waits_for(self, session: MontySession) -> bool:
        """Return whether a process waits for the session with its variables; it may have used up a per-process
        allowance."""
        return session in self._waiting

    async def leave(self, session: MontySession) -> None:
        """End the process that waits for the session, if one does."""
        if (one := self._waiting.pop(session, None)) is not None:
            await self._end(one)

    async def close(self) -> None:
        for session in list(self._waiting):
            await self.leave(session)
        await self.pool.__aexit__(None, None, None)


def python(code: str) -> str:
    """Run a Python program. The answer is what it prints, and the value of its last expression.

    Variables stay from call to call. There are the modules math, re, json, random, datetime, itertools, functools,
    collections, decimal, dataclasses and typing; no others, no files and no network.

    Args:
        code: the program
    """
    raise NotImplementedError  # described here, done by Session


class MontySession:
    """Runs one episode's programs, one at a time."""

    def __init__(self, interpreters: MontyInterpreters, spec: ToolSpec) -> None:
        self._interpreters = interpreters
        self.limits: Any = {
            "max_feed_duration_secs": spec.timeout_s,
            "max_memory": spec.memory << 20,
            "max_total_sleep_secs": 0.0,
        }
        self.state: bytes | None = None
        self.closed = False
        self.offered = offer(python, self.run, timeout_s=None)
        """The tool. It limits its programs' time itself, because waiting for a free process does not count."""

    async def run(self, code: str) -> str:
        """Run a program; a failed one leaves the variables unchanged."""
        used = self._interpreters.waits_for(self)
        try:
            return await self._run(code)
        except ToolFailed as failed:
            if not used or OVERSPENT not in str(failed):
                raise
        return await self._run(code, fresh=True)  # earlier programs have used up the allowance

    async def _run(self, code: str, fresh: bool = False) -> str:
        from pydantic_monty import CollectString, MontyCrashedError, MontyError

        printed = CollectString(max_bytes=PRINTED_BYTES)
        try:
            async with self._interpreters.process(self, fresh=fresh) as one:
                value = await one.feed_run(code, print_callback=printed)
                state = await one.dump()
        except MontyCrashedError as error:
            raise ToolError(f"the interpreter was ended: {error}") from None
        except MontyError as error:
            raise ToolFailed(f"{printed.output}{_explain(error)}") from None
        note = ""
        if len(state) <= STATE_BYTES:
            self.state = state
        else:
            await self._interpreters.leave(self)
            note = f"\n(the variables take {len(state):,} bytes, more than {STATE_BYTES:,}: this call's are forgotten)"
        shown = "" if value is None else _shown(value)
        return f"{printed.output}{shown}{note}" or "(no output: print what you want to see)"

    async def close(self) -> None:
        self.closed = True
        await self._interpreters.leave(self)


def _explain(error: Any) -> str:
    """Return the error with the program's lines that led to it."""
    return str(error.display() if hasattr(error, "display") else error)


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 10
    short.maxstring = short.maxother = short.maxlong = RESULT_BYTES
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = short.maxfrozenset = 2000
    return short


_SHORT = _short()


def _shown(value: Any) -> str:
    """Return the value as an interpreter prints it, truncated: unbounded text would delay other calls."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python likes to write
        return "(a number that is too long to be shown)"
