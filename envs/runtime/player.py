"""Calls user code and turns its errors into data: the caller always gets a reply.

Used by the worker for environments that run in its event loop, and by child processes for those that block.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from opentinker.envs.base import Action, BadReply, Environment, Opening, Prompt, Step, Unreachable
from opentinker.envs.bots import WithBots, with_bots
from opentinker.envs.import_clock import ImportClock
from opentinker.envs.registry import make
from opentinker.envs.rounds import check_round_reward, prompts_of, title_of
from opentinker.envs.with_tools import with_tools
from opentinker.shared.messaging.reply_validation import (
    ERROR_CHARACTERS,
    NAME_CHARACTERS,
    NAMED_NUMBERS,
    OBSERVATION_BYTES,
    PROMPT_IDS,
    failure,
    outcomes_problem,
    round_problem,
    size_of,
)
from opentinker.shared.types.core import Ending, Image, Message, Text, Tool, ToolCall
from opentinker.shared.types.env_protocol import (
    MAX_CANDIDATES,
    OpenSession,
    SeatAction,
    SeatPrompt,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.error_text import error_tail
from opentinker.shared.types.errors import OpenTinkerError


class Player(Protocol):
    """Plays one episode. Calls never overlap and never raise; cancelling a running call abandons the episode."""

    async def open(self, request: OpenSession) -> SessionReply: ...
    async def step(self, request: StepSession) -> SessionReply: ...
    async def close(self) -> None: ...


class OutOfTurn(Exception):
    """Request for the wrong seat: the caller's mistake, not the environment's."""


@dataclass
class Branch:
    """An instance of the environment, and who acts next in it."""

    environment: Environment
    asked: SessionReply


class LocalPlayer:
    """Plays an environment instance, or copies of it, in this process and event loop."""

    def __init__(self, worker: str, *, modules: bool) -> None:
        self._worker = worker
        self._modules = modules
        self._branches: list[Branch] = []
        """While the episode is open: the environment, or after a turn with candidates a copy for each of them."""
        self._can_fork = False
        self.importing: Callable[[], AbstractContextManager[object]] = nullcontext
        """Stops the episode's clock while a server imports the environment."""

    async def open(self, request: OpenSession) -> SessionReply:
        return await guard_user_code(self._worker, self._open(request))

    async def step(self, request: StepSession) -> SessionReply:
        return await guard_user_code(self._worker, self._step(request))

    @property
    def environment(self) -> Environment | None:
        """The instance while the episode is open, the first one of several."""
        return self._branches[0].environment if self._branches else None

    async def close(self) -> None:
        branches, self._branches = self._branches, []
        await self._close_all(branches)

    async def _close_all(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            await guard_user_code(self._worker, self._close(branch.environment))

    async def _open(self, request: OpenSession) -> SessionReply:
        made = make(request.environment, request.config, modules=self._modules)
        made.policy, made.bot_seats = request.policy, request.bots
        if isinstance(made, ImportClock):
            made.importing = self.importing
        self._can_fork = made.can_fork
        environment = with_bots(with_tools(made, request.tool_turns), made)
        branch = Branch(environment, SessionReply(worker=self._worker))
        self._branches = [branch]
        opened = await _await_result(environment, "open", environment.open(request.row, request.seed))
        branch.asked = opening_of(self._worker, environment, opened)
        return branch.asked

    async def _step(self, request: StepSession) -> SessionReply:
        if request.candidates:
            return await self._step_candidates(request)
        if len(self._branches) != 1:
            raise OutOfTurn(f"turn {request.turn} follows one with candidates, and chooses none of them")
        (branch,) = self._branches
        actions = actions_in_turn(branch.asked, request.turn, request.actions, together=bool(request.round))
        return await self._play(branch, request.turn, actions)

    async def _step_candidates(self, request: StepSession) -> SessionReply:
        """Go on with the chosen branch: play every candidate on a copy of it."""
        if not 0 <= request.chosen < len(self._branches):
            raise OutOfTurn(f"turn {request.turn} goes on with candidate {request.chosen}, which there is not")
        if len(request.candidates) > MAX_CANDIDATES:
            raise OutOfTurn(f"{len(request.candidates)} candidates; a turn has at most {MAX_CANDIDATES}")
        base = self._branches[request.chosen]
        if not self._can_fork:
            raise OutOfTurn(f"{title_of(base.environment)} cannot fork: it does not set can_fork = True")
        together = bool(base.asked.round)
        actions_K = [
            actions_in_turn(base.asked, request.turn, actions, together=together) for actions in request.candidates
        ]
        others, self._branches = [branch for branch in self._branches if branch is not base], [base]
        await self._close_all(others)
        copies = [Branch(copy.deepcopy(base.environment), base.asked) for _ in actions_K[1:]]
        self._branches = [*copies, base]
        outcomes = []
        for branch, actions in zip(self._branches, actions_K, strict=True):
            outcomes.append(await self._play(branch, request.turn, actions))
            await asyncio.sleep(0)  # other sessions take their turns in between
        if problem := outcomes_problem(outcomes):
            raise BadReply(f"{title_of(base.environment)}: {problem}")
        return SessionReply(worker=self._worker, outcomes=outcomes, done=all(one.done for one in outcomes))

    async def _play(self, branch: Branch, turn: int, actions: Sequence[SeatAction]) -> SessionReply:
        """Play the turn of the seats that the branch asks."""
        environment, given = branch.environment, [action_of(turn, action) for action in actions]
        together = bool(branch.asked.round)
        method = "step_all" if together else "step"
        playing = environment.step_all(given) if together else environment.step(given[0])
        branch.asked = reply_of(self._worker, environment, await _await_result(environment, method, playing), method)
        return branch.asked

    async def _close(self, environment: Environment) -> SessionReply:
        await _await_result(environment, "close", environment.close())
        return SessionReply(worker=self._worker)


async def _await_result(environment: Environment, method: str, answer: Awaitable[Any]) -> Any:
    """Await a method's result. Raise BadReply if it is not awaitable."""
    if not inspect.isawaitable(answer):
        name = type(environment).__name__
        raise BadReply(f"{name}.{method} must be declared `async def`: it returned {_kind(answer)}")
    return await answer


async def guard_user_code(worker: str, call: Awaitable[SessionReply]) -> SessionReply:
    """Turn any exception of user code, SystemExit included, into a failure of the episode that raised it."""
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
        return failure(worker, Ending.ENV_ERROR, format_error(error))


def format_error(error: BaseException) -> str:
    """Return the innermost frames and the error, enough to find the line."""
    return error_tail("".join(traceback.format_exception(error, limit=-4)).rstrip(), ERROR_CHARACTERS)


def actions_in_turn(asked: SessionReply, turn: int, given: Sequence[SeatAction], *, together: bool) -> list[SeatAction]:
    """Return the actions of the seats that `asked` names, in that order. Raise OutOfTurn unless exactly one action of
    each of these seats is given. `together`: whether the given ones are a round."""
    seats = [prompt.seat for prompt in asked.prompts]
    actions = {action.seat: action for action in given}
    if len(actions) < len(given) or sorted(actions) != sorted(seats) or bool(asked.round) != together:
        due, others = (", ".join(map(repr, names)) for names in (seats, [action.seat for action in given]))
        whose = f"a round of the seats {due}" if asked.round else f"for seat {due}"
        raise OutOfTurn(f"turn {turn} is {whose}, not {others:.200}")
    return [actions[seat] for seat in seats]


def action_of(turn: int, request: SeatAction) -> Action:
    return Action(
        text=request.text,
        stop=request.stop,
        turn=turn,
        seat=request.seat,
        tool_calls=request.tool_calls,
        problem=request.problem,
        words=request.words,
        ids=request.ids,
        logprobs=request.logprobs,
        prompt_tokens=request.prompt_tokens,
    )


def opening_of(worker: str, environment: Environment, opened: object) -> SessionReply:
    """Return the validated reply. Raise BadReply."""
    if not isinstance(opened, Opening):
        opened = Opening(messages=_check_messages(opened, "open()"), seat=environment.seats[0])
    reply = SessionReply(
        worker=worker, wants_tokens=environment.wants_tokens, **_next_turn(environment, opened, "open")
    )
    for prompt in reply.prompts:
        if not (prompt.messages or prompt.prompt_ids or prompt.prompt_text):
            whose = f" for seat {prompt.seat!r}" if reply.round else ""
            raise BadReply(f"open() gave no message{whose}: the policy needs a prompt")
    return reply


def reply_of(worker: str, environment: Environment, step: object, method: str = "step") -> SessionReply:
    """Return the validated reply. Raise BadReply. `method`: `step` or `step_all`."""
    if not isinstance(step, Step):
        raise BadReply(f"{method}() must return a Step, not {_kind(step)}")
    done, truncated = _check_flag("done", step.done), _check_flag("truncated", step.truncated)
    if truncated and not done:
        raise BadReply("truncated without done: an episode that a limit ends is done")
    seats = environment.rewarded if isinstance(environment, WithBots) else environment.seats
    if not isinstance(step.rewards, dict) or not set(step.rewards) <= set(seats):
        raise BadReply(f"rewards must be a dict by seat; the seats are: {', '.join(seats) or '(one)'}")
    reward, components = checked_number("reward", step.reward), checked_numbers("components", step.components)
    if method == "step_all":
        check_round_reward(environment, reward, components)
    is_left = truncated and bool(step.messages or step.acting)
    return SessionReply(
        worker=worker,
        **({} if done and not is_left else _next_turn(environment, step, method)),
        reward=reward,
        components=components,
        rewards={seat: checked_numbers(f"rewards[{seat!r}]", parts) for seat, parts in step.rewards.items()},
        done=done,
        truncated=truncated,
        metrics=checked_numbers("metrics", step.metrics),
    )


def _next_turn(environment: Environment, said: Opening | Step, method: str) -> dict[str, Any]:
    """Return the validated fields that `open` and `step` share. Raise BadReply."""
    prompts = prompts_of(environment, said, method)
    if said.acting is None:
        return _checked_prompt(said.seat, said, f"{method}()")
    seen = [
        SeatPrompt(**_checked_prompt(seat, prompt, f"{method}(), seat {seat!r},")) for seat, prompt in prompts.items()
    ]
    if problem := round_problem(seen):
        raise BadReply(f"{title_of(environment)}.{method}(): {problem}")
    return {"round": seen}


def _checked_prompt(seat: str, said: Prompt, source: str) -> dict[str, Any]:
    """Return the validated fields of what one seat sees. Raise BadReply."""
    if type(said.stream) is not str or len(said.stream) > NAME_CHARACTERS:
        raise BadReply(f"{source}: stream must be a str of at most {NAME_CHARACTERS} characters")
    if said.max_tokens is not None and (type(said.max_tokens) is not int or said.max_tokens < 1):
        raise BadReply(f"{source}: max_tokens must be a positive int or None, not {_kind(said.max_tokens)}")
    if said.prompt_text is not None and type(said.prompt_text) is not str:
        raise BadReply(f"{source}: prompt_text must be a str or None, not {_kind(said.prompt_text)}")
    prompt_ids = None if said.prompt_ids is None else _check_list("prompt_ids", said.prompt_ids, int)
    if prompt_ids is not None and len(prompt_ids) > PROMPT_IDS:
        raise BadReply(f"{source} gave {len(prompt_ids):,} prompt_ids; at most {PROMPT_IDS:,} are allowed")
    messages = _check_messages(said.messages, source)
    tools, stop = _check_list("tools", said.tools, Tool), _check_list("stop", said.stop, str)
    _check_size(source, messages, tools, stop, said.prompt_text)
    return {
        "seat": seat,
        "stream": said.stream,
        "messages": messages,
        "tools": tools,
        "prompt_ids": prompt_ids,
        "prompt_text": said.prompt_text,
        "max_tokens": said.max_tokens,
        "stop": stop,
    }


def _check_flag(field: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadReply(f"{field} must be True or False, not {_kind(value)}")
    return bool(value)


def _check_list(field: str, values: object, kind: type) -> list[Any]:
    if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
        raise BadReply(f"{field} must be a list of {kind.__name__}")
    return list(values)


def _check_messages(messages: object, source: str) -> list[Message]:
    """Return a list of messages with valid field types. Raise BadReply."""
    if not isinstance(messages, list | tuple):
        raise BadReply(f"{source} must give a list of Message, not {_kind(messages)}")
    for message in messages:
        if type(message) is not Message:
            raise BadReply(f"{source} must give a list of Message; one item is {_kind(message)}")
        _check_types(message)
    return list(messages)


def _check_types(message: Message) -> None:
    """Check the types of a message's fields. Raise BadReply."""
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
    _check_list("tool_calls", message.tool_calls, ToolCall)


def _check_size(
    source: str, messages: list[Message], tools: list[Tool], stop: list[str], prompt_text: str | None
) -> None:
    """Check that the observation fits into a reply. Raise BadReply."""
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
    """Return a finite float from a boolean or scalar of Python or numpy. Raise BadReply."""
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
    """Return the type and, for plain data, the beginning of the value. Never calls user code."""
    name = type(value).__name__
    return f"{name} {value!r:.60}" if type(value) in (str, int, float, bool, type(None)) else name


def on_worker(reply: SessionReply, worker: str) -> SessionReply:
    return msgspec.structs.replace(reply, worker=worker)
