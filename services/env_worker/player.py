"""Where user code is called, and where its mistakes become data: whatever an environment does, the caller gets a reply.

Used by the worker for environments that run in its event loop, and by the child processes for those that block.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import traceback
from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from opentinker.envs.base import Action, Environment, Step
from opentinker.envs.registry import make
from opentinker.shared.errors import SpecError
from opentinker.shared.sessions import OpenSession, SessionReply, StepSession
from opentinker.shared.types import Ending, Message

OBSERVATION_BYTES = 256 * 1024
"""All messages of one reply together."""
NAMED_NUMBERS = 64
"""Components, and metrics, of one reply."""
ERROR_CHARACTERS = 2000


class Player(Protocol):
    """Plays one episode. Calls never overlap and never raise; cancelling a running call abandons the episode."""

    async def open(self, request: OpenSession) -> SessionReply: ...
    async def step(self, request: StepSession) -> SessionReply: ...
    async def close(self) -> None: ...


class BadReply(Exception):
    """The environment answered with something that is not an observation and finite numbers."""


def failure(worker: str, ending: Ending, error: str) -> SessionReply:
    """`error` is cut to its end, where a traceback says what happened, and made fit to be sent."""
    text = error[-ERROR_CHARACTERS:].encode(errors="replace").decode()
    return SessionReply(worker=worker, failure=ending, error=text)


class LocalPlayer:
    """The environment instance lives in this process, its coroutines run in this event loop."""

    def __init__(self, worker: str, *, modules: bool) -> None:
        self._worker = worker
        self._modules = modules
        self._environment: Environment | None = None

    async def open(self, request: OpenSession) -> SessionReply:
        return await contain(self._worker, self._open(request))

    async def step(self, request: StepSession) -> SessionReply:
        return await contain(self._worker, self._step(request))

    async def close(self) -> None:
        if self._environment is not None:
            environment, self._environment = self._environment, None
            await contain(self._worker, self._close(environment))

    async def _open(self, request: OpenSession) -> SessionReply:
        self._environment = make(request.environment, request.config, modules=self._modules)
        messages = await self._environment.open(request.row, request.seed)
        checked = checked_messages(messages, "open()")
        if not checked:
            raise BadReply("open() gave no message: the policy needs a prompt")
        return SessionReply(worker=self._worker, messages=checked)

    async def _step(self, request: StepSession) -> SessionReply:
        assert self._environment is not None
        step = await self._environment.step(Action(text=request.text, stop=request.stop, turn=request.turn))
        return reply_of(self._worker, step)

    async def _close(self, environment: Environment) -> SessionReply:
        await environment.close()
        return SessionReply(worker=self._worker)


async def contain(worker: str, call: Awaitable[SessionReply]) -> SessionReply:
    """The boundary: user code may raise anything, SystemExit included, and only its own episode ends."""
    try:
        return await call
    except asyncio.CancelledError:
        raise
    except BadReply as error:
        return failure(worker, Ending.ENV_BAD_REPLY, str(error))
    except SpecError as error:
        return failure(worker, Ending.ENV_ERROR, str(error))
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit() in it ends its episode, not the worker
        return failure(worker, Ending.ENV_ERROR, short_traceback(error))


def short_traceback(error: BaseException) -> str:
    """The innermost frames and the error itself: enough to find the line."""
    return "".join(traceback.format_exception(error, limit=-4))[-ERROR_CHARACTERS:].rstrip()


def reply_of(worker: str, step: object) -> SessionReply:
    """Raises BadReply unless every field is what it should be."""
    if not isinstance(step, Step):
        raise BadReply(f"step() must return a Step, not {_kind(step)}")
    if type(step.done) is not bool:
        raise BadReply(f"done must be True or False, not {_kind(step.done)}")
    return SessionReply(
        worker=worker,
        messages=[] if step.done else checked_messages(step.messages, "step()"),
        reward=checked_number("reward", step.reward),
        components=checked_numbers("components", step.components),
        done=step.done,
        metrics=checked_numbers("metrics", step.metrics),
    )


def checked_messages(messages: object, source: str) -> list[Message]:
    """Raises BadReply unless it is a list of messages that fits into a reply."""
    if not isinstance(messages, list | tuple):
        raise BadReply(f"{source} must give a list of Message, not {_kind(messages)}")
    size = 0
    for message in messages:
        if type(message) is not Message:
            raise BadReply(f"{source} must give a list of Message; one item is {_kind(message)}")
        if type(message.role) is not str or type(message.content) is not str:
            wrong = "role" if type(message.role) is not str else "content"
            raise BadReply(f"a message's {wrong} must be str, not {_kind(getattr(message, wrong))}")
        try:
            size += len(message.role.encode()) + len(message.content.encode())
        except UnicodeEncodeError as error:
            raise BadReply(f"{source} gave a message that is not valid Unicode: {error}") from None
    if size > OBSERVATION_BYTES:
        raise BadReply(f"{source} gave {size:,} bytes of messages; at most {OBSERVATION_BYTES:,} are allowed")
    return list(messages)


def checked_numbers(field: str, values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise BadReply(f"{field} must be a dict of numbers, not {_kind(values)}")
    if len(values) > NAMED_NUMBERS:
        raise BadReply(f"{field} has {len(values)} entries; at most {NAMED_NUMBERS} are allowed")
    checked = {}
    for name, value in values.items():
        if type(name) is not str or len(name) > 100 or not name.isascii():
            raise BadReply(f"{field} must be named by short ASCII strings, not {_kind(name)}")
        checked[name] = checked_number(f"{field}[{name!r}]", value)
    return checked


def checked_number(field: str, value: Any) -> float:
    """Booleans and numpy scalars count as numbers; NaN and infinity do not."""
    if type(value) is not float:
        if not isinstance(value, numbers.Real):
            raise BadReply(f"{field} must be a number, not {_kind(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise BadReply(f"{field} is too large for a float") from None
    if not math.isfinite(value):
        raise BadReply(f"{field} must be finite, not {value}")
    return float(value)


def _kind(value: object) -> str:
    """Type and, for plain data, the beginning of the value. Never calls user code."""
    name = type(value).__name__
    return f"{name} {value!r:.60}" if type(value) in (str, int, float, bool, type(None)) else name


def on_worker(reply: SessionReply, worker: str) -> SessionReply:
    return msgspec.structs.replace(reply, worker=worker)
