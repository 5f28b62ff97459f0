"""Compares mathematical answers in processes of their own (`grader.py`), beside the event loop, with a hard limit.

Plain numbers are compared at once and never get there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import weakref
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec

import msgspec
import orjson

GRADERS = 2
"""Processes per env worker."""
SECONDS = 5
"""For each of the three parts of a comparison: reading the right answer, reading what was said, and comparing."""
LIMIT_S = 3.0 * SECONDS + 5.0
"""Then the process is killed; its start is in it."""
LONGEST = 20_000
"""Characters of what was said, its end."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?|[-+]?\.\d{1,40}")


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    right: bool
    answered: bool
    """Something reads as an answer."""
    late: bool = False
    """No verdict was reached in time: it counts as wrong."""


def number_of(text: str) -> Decimal | None:
    """The value of a plain number, thousands separated by commas or not."""
    plain = text.strip().strip("$").strip()
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def at_once(answer: str, said: str) -> Grade | None:
    """The verdict where the right answer is a plain number and the last box holds one; else None."""
    wanted, box = number_of(answer), _BOXED.match(said, max(0, said.rfind("\\boxed")))
    found = number_of(box[1]) if wanted is not None and box else None
    return None if found is None else Grade(right=found == wanted, answered=True)


class Grader:
    """One process, started when first needed; a comparison that it does not finish ends it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def grade(self, answer: str, said: str) -> Grade:
        try:
            async with asyncio.timeout(LIMIT_S):
                verdict = await self._ask(answer, said)
        except TimeoutError:
            verdict = None
        except BaseException:
            await self.close()  # what it answers now nobody would read
            raise
        if verdict is None:
            await self.close()
            return Grade(right=False, answered=False, late=True)
        return verdict

    async def _ask(self, answer: str, said: str) -> Grade | None:
        """None if the process ended."""
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(orjson.dumps([answer, said]) + b"\n")
            await process.stdin.drain()
        except ConnectionError:
            return None
        line = await process.stdout.readline()
        return msgspec.json.decode(line, type=Grade) if line else None

    async def _start(self) -> asyncio.subprocess.Process:
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing in the working directory is taken for a package of ours
            "-m",
            "opentinker.envs.grader",
            str(SECONDS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Graders:
    """Of one event loop: `GRADERS` comparisons at once, further ones wait."""

    def __init__(self) -> None:
        self._free: asyncio.Queue[Grader] = asyncio.Queue()
        for _ in range(GRADERS):
            self._free.put_nowait(Grader())

    async def grade(self, answer: str, said: str) -> Grade:
        """Whether `said` gives `answer`: by value, e.g. 1/2 and 0.5 and \\frac{1}{2} are the same."""
        ending = said[-LONGEST:]
        if (verdict := at_once(answer, ending)) is not None:
            return verdict
        grader = await self._free.get()
        try:
            return await grader.grade(answer, ending)
        finally:
            self._free.put_nowait(grader)


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Graders] = weakref.WeakKeyDictionary()


def graders() -> Graders:
    """Those of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = Graders()
    return _of_loops[loop]


def installed() -> bool:
    return find_spec("math_verify") is not None
