"""Python functions of the operator's own as tools: `package.module:name` of a function, or of a list of functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import msgspec

from opentinker.envs.threads import in_daemon_thread
from opentinker.envs.tools import NoTools, OfferedTool, ToolError, as_text, offer, truncate
from opentinker.shared.spec.tools import ToolSpec

MAX_RUNNING = 16
"""Calls of one function that have not returned: threads cannot be ended, and coroutines may go on regardless."""


class Functions:
    """Tool functions of one env worker. Calls that have not returned are counted over all episodes of all jobs."""

    def __init__(self) -> None:
        self._by_module: dict[str, list[OfferedTool]] = {}
        """Functions by `module` of the spec."""

    def load(self, spec: ToolSpec) -> list[OfferedTool]:
        """Return the tools of a spec, importing its module. Blocking. Raise NoTools."""
        assert spec.module is not None
        if (found := self._by_module.get(spec.module)) is None:  # of two concurrent loads the first counts
            found = self._by_module.setdefault(spec.module, _import_tools(spec.module))
        return [msgspec.structs.replace(one, timeout_s=spec.timeout_s) for one in found]


def _import_tools(named: str) -> list[OfferedTool]:
    """Return the functions of a module. Raise NoTools."""
    module, _, name = named.partition(":")
    try:
        found = getattr(import_module(module), name)
        return [_make_tool(function) for function in (found if isinstance(found, Sequence) else [found])]
    except ImportError as error:
        raise NoTools(f"cannot be imported: {error}") from None
    except AttributeError:
        raise NoTools(f"module {module} has no {name}, or it is not a function") from None
    except TypeError as error:
        raise NoTools(str(error)) from None
    except Exception as error:  # user code: a module that raises offers no tools
        raise NoTools(f"module {module} cannot be imported: {type(error).__name__}: {error}") from error


def _make_tool(function: Callable[..., Any]) -> OfferedTool:
    """Call a function: async ones in the event loop, plain ones each in a thread, because they may block. One that
    exceeds its time is left alone and counted."""
    running: set[object] = set()
    begin = _in_loop if inspect.iscoroutinefunction(function) else _in_thread

    async def run(**arguments: Any) -> str:
        if len(running) >= MAX_RUNNING:
            raise ToolError(f"{MAX_RUNNING} calls of it have not returned yet")
        return await begin(lambda: function(**arguments), running)

    return offer(function, run)


def _format_result(result: Any) -> str:
    """Convert a result to text in a thread, limited to the size of an observation: an endless result would never be
    written completely."""
    if isinstance(result, Iterator):
        raise ToolError("the function gave an iterator in place of a result")
    return truncate(as_text(result))


def _own(error: BaseException) -> Exception:
    """One that a future can hold, and that ends nothing but the call."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ToolError(f"{type(error).__name__}: {error}")


async def _in_loop(call: Callable[[], Awaitable[Any]], running: set[object]) -> str:
    async def contained() -> str:
        try:
            result = await call()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the function's own; sys.exit() would end the event loop
            raise _own(error) from None
        return await asyncio.to_thread(_format_result, result)

    task = asyncio.get_running_loop().create_task(contained(), name="tool")
    running.add(task)
    task.add_done_callback(running.discard)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_heard)
        raise
    return task.result()


def _heard(task: asyncio.Task[str]) -> None:
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


def _in_thread(call: Callable[[], Any], running: set[object]) -> asyncio.Future[str]:
    mark = object()
    running.add(mark)

    def run() -> str:
        try:
            result = call()
            return _format_result(asyncio.run(_await_result(result)) if inspect.isawaitable(result) else result)
        except BaseException as error:  # noqa: BLE001 - the function's own; raised again in the loop
            raise _own(error) from None
        finally:
            running.discard(mark)

    return in_daemon_thread(run, "tool")


async def _await_result(result: Awaitable[Any]) -> Any:
    """Wrap a function that is not declared async."""
    return await result
