"""The `python` tool in pydantic-monty: an interpreter without an operating system, in processes of its own.

A program has no files, no network and no modules but a few of the standard library's; its time and memory are bounded
by the interpreter, and the process is killed from outside if that fails. What an episode's programs have assigned is
kept as bytes between its calls, so no process waits for an episode.
"""

from __future__ import annotations

import os
import reprlib
from typing import TYPE_CHECKING, Any

from opentinker.envs.tools import RESULT_BYTES, Failed, Offered, ToolError, checked, describe
from opentinker.shared.spec.tools import ToolSpec

if TYPE_CHECKING:
    from pydantic_monty import AsyncMonty

PRINTED_BYTES = 5 * RESULT_BYTES
STATE_BYTES = 1 << 20
"""Of the variables of one episode."""
POLICY: Any = {"sleep": "zero", "random_start": {"seed": 0}}
"""The same program says the same, and never waits."""


class Interpreters:
    """The processes, shared by all episodes of an env worker. They are started when first needed."""

    broken = False

    def __init__(self, pool: AsyncMonty) -> None:
        self.pool = pool

    @classmethod
    async def open(cls) -> Interpreters:
        from pydantic_monty import AsyncMonty

        pool = AsyncMonty(min_processes=1, max_processes=os.cpu_count() or 1, max_checkouts_per_worker=1000)
        await pool.__aenter__()
        return cls(pool)

    async def close(self) -> None:
        await self.pool.__aexit__(None, None, None)


def python(code: str) -> str:
    """Run a Python program. The answer is what it prints, and the value of its last expression.

    Variables stay from call to call. There are the modules math, re, json, random, datetime, itertools, functools,
    collections, decimal, dataclasses and typing; no others, no files and no network.

    Args:
        code: the program
    """
    raise NotImplementedError  # described here, done by Session


class Session:
    """One episode's programs, one after the other."""

    def __init__(self, interpreters: Interpreters, spec: ToolSpec) -> None:
        self._pool = interpreters.pool
        self._limits: Any = {
            "max_feed_duration_secs": spec.timeout_s,
            "max_memory": spec.memory << 20,
            "max_total_sleep_secs": 0.0,
        }
        self._state: bytes | None = None
        self._tool, self._arguments = describe(python)

    @property
    def offered(self) -> Offered:
        """Its own time limit holds while a program runs; waiting for a free process is no part of it."""
        return Offered(tool=self._tool, run=self.run, timeout_s=None)

    async def run(self, arguments: dict[str, Any]) -> str:
        """A program that fails leaves the variables as they were."""
        from pydantic_monty import CollectString, MontyCrashedError, MontyError

        code = checked(self._arguments, arguments)["code"]
        printed = CollectString(max_bytes=PRINTED_BYTES)
        try:
            async with self._pool.checkout(limits=self._limits, os_policy=POLICY) as one:
                if self._state is not None:
                    await one.load_session(self._state)
                value = await one.feed_run(code, print_callback=printed)
                state = await one.dump()
        except MontyCrashedError as error:
            raise ToolError(f"the interpreter was ended: {error}") from None
        except MontyError as error:
            raise Failed(f"{printed.output}{_explained(error)}") from None
        note = ""
        if len(state) <= STATE_BYTES:
            self._state = state
        else:
            note = f"\n(the variables take {len(state):,} bytes, more than {STATE_BYTES:,}: this call's are forgotten)"
        shown = "" if value is None else _shown(value)
        return f"{printed.output}{shown}{note}" or "(no output: print what you want to see)"


def _explained(error: Any) -> str:
    """With the lines of the program that led to it."""
    return str(error.display() if hasattr(error, "display") else error)


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 10
    short.maxstring = short.maxother = short.maxlong = RESULT_BYTES
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = short.maxfrozenset = 2000
    return short


_SHORT = _short()


def _shown(value: Any) -> str:
    """As an interpreter shows it, cut where it is long: nobody else's turn waits for a text that nobody reads."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python likes to write
        return "(a number that is too long to be shown)"
