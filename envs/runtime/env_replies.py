"""Validation of what user code returns from `open`, `step` and `step_all`: a mistake is a BadReply that says where."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from opentinker.envs.base import BadReply, Environment, Opening, Prompt, Step, fields_of
from opentinker.envs.bots import WithBots
from opentinker.envs.rounds import check_round_reward, prompts_of, title_of
from opentinker.shared.messaging.reply_validation import (
    NAME_CHARACTERS,
    NAMED_NUMBERS,
    OBSERVATION_BYTES,
    PROMPT_IDS,
    round_problem,
    size_of,
)
from opentinker.shared.types.core import Image, Message, Text, Tool, ToolCall
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from opentinker.shared.types.guide import Guide


def opening_reply(worker: str, environment: Environment, opened: object) -> SessionReply:
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


def step_reply(worker: str, environment: Environment, step: object, method: str = "step") -> SessionReply:
    """Return the validated reply. Raise BadReply. `method`: `step` or `step_all`."""
    if not isinstance(step, Step):
        raise BadReply(f"{method}() must return a Step, not {kind_of(step)}")
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
        raise BadReply(f"{source}: max_tokens must be a positive int or None, not {kind_of(said.max_tokens)}")
    if said.prompt_text is not None and type(said.prompt_text) is not str:
        raise BadReply(f"{source}: prompt_text must be a str or None, not {kind_of(said.prompt_text)}")
    prompt_ids = None if said.prompt_ids is None else _check_list("prompt_ids", said.prompt_ids, int)
    if prompt_ids is not None and len(prompt_ids) > PROMPT_IDS:
        raise BadReply(f"{source} gave {len(prompt_ids):,} prompt_ids; at most {PROMPT_IDS:,} are allowed")
    messages = _check_messages(said.messages, source)
    tools, stop = _check_list("tools", said.tools, Tool), _check_list("stop", said.stop, str)
    if said.guide is not None and type(said.guide) is not Guide:
        raise BadReply(f"{source}: guide must be a Guide or None, not {kind_of(said.guide)}")
    _check_size(source, messages, [tools, said.guide], stop, said.prompt_text)
    checked = {"messages": messages, "tools": tools, "prompt_ids": prompt_ids, "stop": stop}
    return {"seat": seat, **fields_of(Prompt, said), **checked}


def _check_flag(field: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadReply(f"{field} must be True or False, not {kind_of(value)}")
    return bool(value)


def _check_list(field: str, values: object, kind: type) -> list[Any]:
    if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
        raise BadReply(f"{field} must be a list of {kind.__name__}")
    return list(values)


def _check_messages(messages: object, source: str) -> list[Message]:
    """Return a list of messages with valid field types. Raise BadReply."""
    if not isinstance(messages, list | tuple):
        raise BadReply(f"{source} must give a list of Message, not {kind_of(messages)}")
    for message in messages:
        if type(message) is not Message:
            raise BadReply(f"{source} must give a list of Message; one item is {kind_of(message)}")
        _check_types(message)
    return list(messages)


def _check_types(message: Message) -> None:
    """Check the types of a message's fields. Raise BadReply."""
    for name in ("role", "tool_call_id", "name"):
        if type(getattr(message, name)) is not str:
            raise BadReply(f"a message's {name} must be str, not {kind_of(getattr(message, name))}")
    if isinstance(message.content, list):
        for part in message.content:
            text = type(part) is Text and type(part.text) is str
            image = type(part) is Image and type(part.data) is bytes and type(part.media_type) is str
            if not (text or image):
                raise BadReply(f"a message's content must be str, or Text and Image; a part is {kind_of(part)}")
    elif type(message.content) is not str:
        raise BadReply(f"a message's content must be str, not {kind_of(message.content)}")
    _check_list("tool_calls", message.tool_calls, ToolCall)


def _check_size(
    source: str, messages: list[Message], tools: list[Any], stop: list[str], prompt_text: str | None
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
        raise BadReply(f"{field} must be a dict of numbers, not {kind_of(values)}")
    if len(values) > NAMED_NUMBERS:
        raise BadReply(f"{field} has {len(values)} entries; at most {NAMED_NUMBERS} are allowed")
    checked = {}
    for name, value in values.items():
        if type(name) is not str or len(name) > NAME_CHARACTERS or not name.isascii():
            raise BadReply(f"{field} must be named by short ASCII strings, not {kind_of(name)}")
        checked[name] = checked_number(f"{field}[{name!r}]", value)
    return checked


def checked_number(field: str, value: Any) -> float:
    """Return a finite float from a boolean or scalar of Python or numpy. Raise BadReply."""
    if type(value) is not float:
        if not isinstance(value, numbers.Real | np.bool_):
            raise BadReply(f"{field} must be a number, not {kind_of(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise BadReply(f"{field} is too large for a float") from None
    if not math.isfinite(value):
        raise BadReply(f"{field} must be finite, not {value}")
    return float(value)


def kind_of(value: object) -> str:
    """Return the type and, for plain data, the beginning of the value. Never calls user code."""
    name = type(value).__name__
    return f"{name} {value!r:.60}" if type(value) in (str, int, float, bool, type(None)) else name
