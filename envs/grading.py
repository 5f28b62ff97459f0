"""Compares mathematical answers in separate processes (`grader.py`), outside the event loop, with a hard time limit.

Plain numbers are compared directly, without a process.
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
"""Time limit for each of the three parts of a comparison: parsing the right answer, parsing the reply, comparing."""
LIMIT_S = 3.0 * SECONDS + 5.0
"""Time after which the process is killed, including its start."""
MAX_REPLY_CHARACTERS = 20_000
"""Only the end of a longer reply is compared."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?|[-+]?\.\d{1,40}")


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    right: bool
    answered: bool
    """The reply contains something that parses as an answer."""
    late: bool = False
    """The comparison timed out: it counts as wrong."""


def number_of(text: str) -> Decimal | None:
    """Return the value of a plain number, with or without commas between thousands; None for other text."""
    plain = text.strip().strip("$").strip()
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def grade_number(answer: str, reply: str) -> Grade | None:
    """Grade the reply if the right answer is a plain number and the last box holds one; else return None."""
    wanted, box = number_of(answer), _BOXED.match(reply, max(0, reply.rfind("\\boxed")))
    found = number_of(box[1]) if wanted is not None and box else None
    return None if found is None else Grade(right=found == wanted, answered=True)


class Grader:
    """One grader process, started on first use and killed if a comparison times out."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None

    async def grade(self, answer: str, reply: str) -> Grade:
        verdict = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limit_s):
                    verdict = await self._ask(answer, reply)
        finally:
            if verdict is None:  # its late answer would be read as that of the next comparison
                await self.close()
        return verdict or Grade(right=False, answered=False, late=True)

    async def _ask(self, answer: str, reply: str) -> Grade | None:
        """Return the verdict, None if the process ended."""
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(orjson.dumps([answer, reply]) + b"\n")
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
            "-P",  # no module in the working directory shadows our packages
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
    """The graders of one event loop: `GRADERS` comparisons run concurrently, others wait."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._free: asyncio.Queue[Grader] = asyncio.Queue()
        for _ in range(GRADERS):
            self._free.put_nowait(Grader(limit_s))

    async def grade(self, answer: str, reply: str) -> Grade:
        """Compare the reply with `answer` by value: 1/2, 0.5 and \\frac{1}{2} are equal."""
        ending = reply[-MAX_REPLY_CHARACTERS:]
        if (verdict := grade_number(answer, ending)) is not None:
            return verdict
        grader = await self._free.get()
        try:
            return await grader.grade(answer, ending)
        finally:
            self._free.put_nowait(grader)


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Graders] = weakref.WeakKeyDictionary()


def graders() -> Graders:
    """Return the graders of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = Graders()
    return _of_loops[loop]


def is_installed() -> bool:
    return find_spec("math_verify") is not None
