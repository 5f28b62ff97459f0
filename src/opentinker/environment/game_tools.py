"""Tools for games with blocking calls from the asynchronous side: graders, and the python tool.

Both run in an event loop of this process in a separate thread, for any caller: a served game, a game server's thread, a
child of an env worker. Never call it from an event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, Literal, TypeVar

from opentinker.envs.builtin.gsm8k import answer_of
from opentinker.envs.grading import Grade, graders
from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import Outcome, run_tool
from opentinker.sdk.loop_thread import LoopThread
from opentinker.shared.config import Settings
from opentinker.shared.types.core import ToolCall

T = TypeVar("T")
Backend = Literal["monty", "sandbox"]
_starting = threading.Lock()


@cache
def _started() -> tuple[LoopThread, ToolFactory]:
    return LoopThread("opentinker-beside"), ToolFactory(Settings())


def _beside() -> tuple[LoopThread, ToolFactory]:
    with _starting:
        return _started()


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Blocking. Raises what it raises."""
    return _beside()[0].call(coroutine)


def graded(answer: str, said: str, data_source: str = "") -> Grade:
    """Grade `said` against `answer`, by value, never by similarity of the texts; gsm8k's answers follow `####`."""
    if "gsm8k" in data_source:
        found = answer_of(said)
        return Grade(right=found is not None and found == answer_of(answer), answered=found is not None)
    return wait_for(_graded(answer, said))


async def _graded(answer: str, said: str) -> Grade:
    return await graders().grade(answer, said)


class Python:
    """The python tool of one episode (docs/environments/tools.md). With `monty` variables persist between calls; with
    `sandbox` every call starts from scratch, in CPython with numpy and sympy."""

    def __init__(self, backend: Backend = "monty", timeout_s: float = 10.0) -> None:
        """Raises ValueError if it cannot be had here."""
        self._spec = {"type": "python", "backend": backend, "timeout_s": timeout_s}
        _check(backend, timeout_s)
        self._tools: Tools | None = None

    def run(self, code: str) -> Outcome:
        """Whatever the program does, there is an answer."""
        if self._tools is None:
            self._tools = wait_for(_beside()[1].open("games", [self._spec]))
        offered = {one.tool.name: one for one in self._tools.offered}
        return wait_for(run_tool(offered, ToolCall(id="python", name="python", arguments={"code": code})))

    def close(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            wait_for(tools.close())


@cache
def _check(backend: Backend, timeout_s: float) -> None:
    mistakes = wait_for(_beside()[1].check([{"type": "python", "backend": backend, "timeout_s": timeout_s}]))
    if mistakes:
        raise ValueError("; ".join(f"python tool: {mistake['problem']}" for mistake in mistakes))
