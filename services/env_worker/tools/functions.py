"""Python functions of the operator's own as tools: `package.module:name` of a function, or of a list of functions."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from opentinker.envs.tools import Offered, ToolError, as_text, checked, describe, offer
from opentinker.services.env_worker.tools.errors import NoTools
from opentinker.shared.spec.tools import ToolSpec

MOST_THREADS = 16
"""Of one function that does not return: threads cannot be ended."""


def load(spec: ToolSpec) -> list[Offered]:
    """Imports the module. Raises NoTools."""
    assert spec.module is not None
    module, _, name = spec.module.partition(":")
    try:
        found = getattr(import_module(module), name)
        functions = list(found) if isinstance(found, Sequence) else [found]
        return [_offered(function, spec.timeout_s) for function in functions]
    except ImportError as error:
        raise NoTools(f"cannot be imported: {error}") from None
    except AttributeError:
        raise NoTools(f"module {module} has no {name}, or it is no function") from None
    except TypeError as error:
        raise NoTools(str(error)) from None
    except Exception as error:  # the module's own code: whatever it raises, it offers nothing
        raise NoTools(f"module {module} cannot be imported: {type(error).__name__}: {error}") from error


def _offered(function: Callable[..., Any], timeout_s: float) -> Offered:
    """Async functions run in the event loop, plain ones each in a thread: they may block."""
    if inspect.iscoroutinefunction(function):
        return offer(function, timeout_s)
    described, model = describe(function)
    running: set[threading.Thread] = set()

    async def run(arguments: dict[str, Any]) -> str:
        given = checked(model, arguments)
        running.difference_update([thread for thread in running if not thread.is_alive()])
        if len(running) >= MOST_THREADS:
            raise ToolError(f"{MOST_THREADS} calls of it have not returned yet")
        return as_text(await _in_thread(lambda: function(**given), running))

    return Offered(tool=described, run=run, timeout_s=timeout_s)


def _in_thread(call: Callable[[], Any], running: set[threading.Thread]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    coming: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if coming.done():
            return
        if error is None:
            coming.set_result(result)
        else:
            coming.set_exception(error)

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (call(), None)
        except Exception as error:  # noqa: BLE001 - the function's own; raised again in the loop
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    thread = threading.Thread(target=run, name="tool", daemon=True)
    running.add(thread)
    thread.start()
    return coming
