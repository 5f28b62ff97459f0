"""Where user code is called, and where its mistakes become data: whatever an environment does, the caller gets a reply.

Used by the worker for environments that run in its event loop, and by the child processes for those that block.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec
import numpy as np

from opentinker.envs.base import Action, BadReply, Environment, Opening, Step, Unreachable
from opentinker.envs.import_clock import ImportClock
from opentinker.envs.registry import make
from opentinker.envs.tools import with_tools
from opentinker.shared.messaging.reply_validation import (
    ERROR_CHARACTERS,
    NAME_CHARACTERS,
    NAMED_NUMBERS,
    OBSERVATION_BYTES,
    PROMPT_IDS,
    failure,
    size_of,
)
from opentinker.shared.types.core import Ending, Image, Message, Text, Tool, ToolCall
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession
from opentinker.shared.types.error_text import error_tail
from opentinker.shared.types.errors import OpenTinkerError


class Player(Protocol):
    """Plays one episode. Calls never overlap and never raise; cancelling a running call abandons the episode."""

    async def open(self, request: OpenSession) -> SessionReply: ...
    async def step(self, request: StepSession) -> SessionReply: ...
    async def close(self) -> None: ...


class OutOfTurn(Exception):
    """The caller's mistake, not the environment's."""


class LocalPlayer:
    """The environment instance lives in this process, its coroutines run in this event loop."""

    def __init__(self, worker: str, *, modules: bool) -> None:
        self._worker = worker
        self._modules = modules
        self._environment: Environment | None = None
        self._seat = self._stream = ""
        """Who acts next, and where."""
        self.importing: Callable[[], AbstractContextManager[object]] = nullcontext
        """Stops the episode's clock; for environments that are imported elsewhere."""

    async def open(self, request: OpenSession) -> SessionReply:
        return await guard_user_code(self._worker, self._open(request))

    async def step(self, request: StepSession) -> SessionReply:
        return await guard_user_code(self._worker, self._step(request))

    @property
    def environment(self) -> Environment | None:
        """The instance, while there is one."""
        return self._environment

    async def close(self) -> None:
        if self._environment is not None:
            environment, self._environment = self._environment, None
            await guard_user_code(self._worker, self._close(environment))

    async def _open(self, request: OpenSession) -> SessionReply:
        made = make(request.environment, request.config, modules=self._modules)
        made.policy = request.policy
        if isinstance(made, ImportClock):
            made.importing = self.importing
        self._environment = with_tools(made, request.tool_turns)
        opened = await _awaited(self._environment, "open", self._environment.open(request.row, request.seed))
        reply = opening_of(self._worker, self._environment, opened)
        self._seat, self._stream = reply.seat, reply.stream
        return reply

    async def _step(self, request: StepSession) -> SessionReply:
        assert self._environment is not None
        if request.seat != self._seat:
            raise OutOfTurn(f"turn {request.turn} is for seat {self._seat!r}, not {request.seat!r}")
        step = await _awaited(self._environment, "step", self._environment.step(action_of(request)))
        reply = reply_of(self._worker, self._environment, step)
        self._seat, self._stream = reply.seat, reply.stream
        return reply

    async def _close(self, environment: Environment) -> SessionReply:
        await _awaited(environment, "close", environment.close())
        return SessionReply(worker=self._worker)


async def _awaited(environment: Environment, method: str, answer: Awaitable[Any]) -> Any:
    """Raises BadReply for a method that is no coroutine."""
    if not inspect.isawaitable(answer):
        name = type(environment).__name__
        raise BadReply(f"{name}.{method} must be declared `async def`: it returned {_kind(answer)}")
    return await answer


async def guard_user_code(worker: str, call: Awaitable[SessionReply]) -> SessionReply:
    """The boundary: user code may raise anything, SystemExit included, and only its own episode ends."""
    try:
        return await call
    except asyncio.CancelledError:
        raise
    except BadReply as error:
        return failure(worker, Ending.ENV_BAD_REPLY, str(error))
    except Unreachable as error:
        return failure(worker, Ending.ENV_LOST, str(error))
    except (OpenTinkerError, OutOfTurn) as error:
        return failure(worker, Ending.ENV_ERROR, str(error))
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit() in it ends its episode, not the worker
        return failure(worker, Ending.ENV_ERROR, short_traceback(error))


def short_traceback(error: BaseException) -> str:
    """The innermost frames and the error itself: enough to find the line."""
    return error_tail("".join(traceback.format_exception(error, limit=-4)).rstrip(), ERROR_CHARACTERS)


def action_of(request: StepSession) -> Action:
    return Action(
        text=request.text,
        stop=request.stop,
        turn=request.turn,
        seat=request.seat,
        tool_calls=request.tool_calls,
        problem=request.problem,
        words=request.words,
        ids=request.ids,
        logprobs=request.logprobs,
        prompt_tokens=request.prompt_tokens,
    )


def opening_of(worker: str, environment: Environment, opened: object) -> SessionReply:
    """Raises BadReply unless every field is what it should be."""
    if not isinstance(opened, Opening):
        opened = Opening(messages=_checked_messages(opened, "open()"), seat=environment.seats[0])
    reply = SessionReply(
        worker=worker, wants_tokens=environment.wants_tokens, **_next_turn(environment, opened, "open()")
    )
    if not (reply.messages or reply.prompt_ids or reply.prompt_text):
        raise BadReply("open() gave no message: the policy needs a prompt")
    return reply


def reply_of(worker: str, environment: Environment, step: object) -> SessionReply:
    """Raises BadReply unless every field is what it should be."""
    if not isinstance(step, Step):
        raise BadReply(f"step() must return a Step, not {_kind(step)}")
    done, truncated = _checked_flag("done", step.done), _checked_flag("truncated", step.truncated)
    if truncated and not done:
        raise BadReply("truncated without done: an episode that a limit ends is done")
    if not isinstance(step.rewards, dict) or not set(step.rewards) <= set(environment.seats):
        raise BadReply(f"rewards must be a dict by seat; the seats are: {', '.join(environment.seats) or '(one)'}")
    is_left = truncated and bool(step.messages)
    return SessionReply(
        worker=worker,
        **({} if done and not is_left else _next_turn(environment, step, "step()")),
        reward=checked_number("reward", step.reward),
        components=checked_numbers("components", step.components),
        rewards={seat: checked_numbers(f"rewards[{seat!r}]", parts) for seat, parts in step.rewards.items()},
        done=done,
        truncated=truncated,
        metrics=checked_numbers("metrics", step.metrics),
    )


def _next_turn(environment: Environment, said: Opening | Step, source: str) -> dict[str, Any]:
    """What `open` and `step` have in common: who acts next, and on what."""
    if type(said.seat) is not str or said.seat not in environment.seats:
        seats = ", ".join(map(repr, environment.seats))
        raise BadReply(f"{source} says that seat {said.seat!r:.60} acts next; the seats are: {seats}")
    if type(said.stream) is not str or len(said.stream) > NAME_CHARACTERS:
        raise BadReply(f"{source}: stream must be a str of at most {NAME_CHARACTERS} characters")
    if said.max_tokens is not None and (type(said.max_tokens) is not int or said.max_tokens < 1):
        raise BadReply(f"{source}: max_tokens must be a positive int or None, not {_kind(said.max_tokens)}")
    if said.prompt_text is not None and type(said.prompt_text) is not str:
        raise BadReply(f"{source}: prompt_text must be a str or None, not {_kind(said.prompt_text)}")
    prompt_ids = None if said.prompt_ids is None else _checked_list("prompt_ids", said.prompt_ids, int)
    if prompt_ids is not None and len(prompt_ids) > PROMPT_IDS:
        raise BadReply(f"{source} gave {len(prompt_ids):,} prompt_ids; at most {PROMPT_IDS:,} are allowed")
    messages = _checked_messages(said.messages, source)
    tools, stop = _checked_list("tools", said.tools, Tool), _checked_list("stop", said.stop, str)
    _check_size(source, messages, tools, stop, said.prompt_text)
    return {
        "seat": said.seat,
        "stream": said.stream,
        "messages": messages,
        "tools": tools,
        "prompt_ids": prompt_ids,
        "prompt_text": said.prompt_text,
        "max_tokens": said.max_tokens,
        "stop": stop,
    }


def _checked_flag(field: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadReply(f"{field} must be True or False, not {_kind(value)}")
    return bool(value)


def _checked_list(field: str, values: object, kind: type) -> list[Any]:
    if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
        raise BadReply(f"{field} must be a list of {kind.__name__}")
    return list(values)


def _checked_messages(messages: object, source: str) -> list[Message]:
    """Raises BadReply unless it is a list of messages whose fields have their types."""
    if not isinstance(messages, list | tuple):
        raise BadReply(f"{source} must give a list of Message, not {_kind(messages)}")
    for message in messages:
        if type(message) is not Message:
            raise BadReply(f"{source} must give a list of Message; one item is {_kind(message)}")
        _check_types(message)
    return list(messages)


def _check_types(message: Message) -> None:
    """Raises BadReply."""
    for name in ("role", "tool_call_id", "name"):
        if type(getattr(message, name)) is not str:
            raise BadReply(f"a message's {name} must be str, not {_kind(getattr(message, name))}")
    if isinstance(message.content, list):
        for part in message.content:
            text = type(part) is Text and type(part.text) is str
            image = type(part) is Image and type(part.data) is bytes and type(part.media_type) is str
            if not (text or image):
                raise BadReply(f"a message's content must be str, or Text and Image; a part is {_kind(part)}")
    elif type(message.content) is not str:
        raise BadReply(f"a message's content must be str, not {_kind(message.content)}")
    _checked_list("tool_calls", message.tool_calls, ToolCall)


def _check_size(
    source: str, messages: list[Message], tools: list[Tool], stop: list[str], prompt_text: str | None
) -> None:
    """Raises BadReply unless it fits into a reply."""
    try:
        size = size_of(messages, tools, stop, prompt_text)
    except UnicodeEncodeError as error:
        raise BadReply(f"{source} gave a text that is not valid Unicode: {error}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadReply(f"{source} gave what cannot be sent: {type(error).__name__}: {error}") from None
    if size > OBSERVATION_BYTES:
        raise BadReply(
            f"{source} gave {size:,} bytes of messages, tools and stops; at most {OBSERVATION_BYTES:,} are allowed"
        )


def checked_numbers(field: str, values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise BadReply(f"{field} must be a dict of numbers, not {_kind(values)}")
    if len(values) > NAMED_NUMBERS:
        raise BadReply(f"{field} has {len(values)} entries; at most {NAMED_NUMBERS} are allowed")
    checked = {}
    for name, value in values.items():
        if type(name) is not str or len(name) > NAME_CHARACTERS or not name.isascii():
            raise BadReply(f"{field} must be named by short ASCII strings, not {_kind(name)}")
        checked[name] = checked_number(f"{field}[{name!r}]", value)
    return checked


def checked_number(field: str, value: Any) -> float:
    """Booleans and scalars, Python's and numpy's, count as numbers; NaN and infinity do not."""
    if type(value) is not float:
        if not isinstance(value, numbers.Real | np.bool_):
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
