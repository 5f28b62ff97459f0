"""Validates replies that untrusted code may have written: a user's process, an environment behind a URL, a sandboxed
child. Types are already checked by decoding (`codec.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import (
    ABOUT_BYTES,
    MAX_CANDIDATES,
    MAX_ROWS,
    ROUND_SEATS,
    EnvAbout,
    EnvCheckReply,
    SeatPrompt,
    SessionReply,
)
from opentinker.shared.types.error_text import error_tail

OBSERVATION_BYTES = 256 * 1024
"""All messages of one reply together, with what may be called, and where a turn stops."""
ROUND_BYTES = 3 * OBSERVATION_BYTES
"""The same of all seats of a round together: a reply is one message of at most a MiB on a WebSocket."""
PROMPT_IDS = 256 * 1024
"""Tokens of a prompt that an environment gives as such: the whole context. Of all seats of a round together."""
NAME_CHARACTERS = 100
NAMED_NUMBERS = 64
"""Components, and metrics, of one reply."""
ERROR_CHARACTERS = 2000
MISTAKES = 50
KNOWN_SEATS = 256
"""Seats of an environment that are compared with a spec."""
ENVIRONMENTS = frozenset({Ending.ENV_ERROR, Ending.ENV_BAD_REPLY, Ending.ENV_LOST})
"""How an environment may fail: the last if what it plays on is not there."""
PLAYERS = ENVIRONMENTS | {Ending.ENV_TIMEOUT}
"""How one may fail who plays environments for others, and knows their deadlines."""


def sound(reply: SessionReply, worker: str, *, player: bool = True) -> SessionReply:
    """The reply under the address of `worker`: a failure if it is not one that an environment may give.

    `player`: of one who plays it for others, and may be busy; else of the environment's own process.
    """
    if reply.failure is not None:
        known = reply.failure in (PLAYERS if player else ENVIRONMENTS)
        return failure(worker, reply.failure if known else Ending.ENV_ERROR, reply.error)
    if player and (reply.busy or reply.opening):
        importing_s = max(0.0, reply.importing_s) if reply.opening else 0.0  # 0 for what is no number
        return SessionReply(worker=worker, busy=reply.busy, opening=reply.opening, importing_s=importing_s)
    if problem := _problem(reply):
        return failure(worker, Ending.ENV_BAD_REPLY, problem)
    return msgspec.structs.replace(reply, worker=worker, busy=False, opening=False, error="")


def failure(worker: str, ending: Ending, error: str) -> SessionReply:
    """`error` is cut to its end, after its sentence, and made fit to be sent."""
    text = error_tail(error, ERROR_CHARACTERS).encode(errors="replace").decode()
    return SessionReply(worker=worker, failure=ending, error=text)


def late_import(worker: str, within_s: float) -> SessionReply:
    """Return the reply of a worker that has given up an import: `within_s` is its deadline."""
    why = f"the environment was not imported within {within_s:g} s (operator setting env_import_timeout_s)"
    return failure(worker, Ending.ENV_TIMEOUT, why)


def _problem(reply: SessionReply) -> str:
    """Describe the first problem of the reply, or return an empty text."""
    if reply.outcomes:
        return _problem_of_outcomes(reply)
    sizes = [_size(prompt) for prompt in reply.prompts]
    names = (*(name for prompt in reply.prompts for name in (prompt.seat, prompt.stream)), *reply.rewards)
    named = (reply.components, reply.metrics, *reply.rewards.values())
    values = (reply.reward, *(value for numbers in named for value in numbers.values()))
    limits = [prompt.max_tokens for prompt in reply.prompts if prompt.max_tokens is not None]
    wrong = {
        f"{max(sizes):,} bytes of messages, tools and stops; at most {OBSERVATION_BYTES:,} are allowed": max(sizes)
        > OBSERVATION_BYTES,
        f"at most {PROMPT_IDS:,} prompt_ids are allowed": len(reply.prompt_ids or ()) > PROMPT_IDS,
        f"seats and streams have names of at most {NAME_CHARACTERS} characters": any(
            len(name) > NAME_CHARACTERS for name in names
        ),
        f"max_tokens must be positive, not {min(limits, default=1)}": min(limits, default=1) < 1,
        f"at most {NAMED_NUMBERS} named numbers are allowed": any(len(numbers) > NAMED_NUMBERS for numbers in named),
        "numbers must be named by short ASCII strings": any(
            len(name) > NAME_CHARACTERS or not name.isascii() for numbers in named for name in numbers
        ),
        "rewards and metrics must be finite": not all(map(math.isfinite, values)),
        f"a row's number is from 0 to {MAX_ROWS:,}": reply.row is not None and not 0 <= reply.row < MAX_ROWS,
    }
    found = next((problem for problem, found in wrong.items() if found), "")
    if found or not reply.round:
        return found
    if any(getattr(reply, field) for field in SeatPrompt.__struct_fields__):
        return "a round and the prompt of a single seat cannot come together"
    return round_problem(reply.round)


def _problem_of_outcomes(reply: SessionReply) -> str:
    for outcome in reply.outcomes:
        if outcome.outcomes or outcome.failure is not None or outcome.busy or outcome.opening:
            return "the outcome of a candidate must be an observation and rewards"
        if problem := _problem(outcome):
            return problem
    if any(getattr(reply, field) for field in (*SeatPrompt.__struct_fields__, "round", "reward", "rewards")):
        return "outcomes of candidates and a prompt or reward cannot come together"
    return outcomes_problem(reply.outcomes)


def outcomes_problem(outcomes: Sequence[SessionReply]) -> str:
    """Describe the first problem in the combined outcomes of a turn's candidates; empty: no problem."""
    if len(outcomes) > MAX_CANDIDATES:
        return f"{len(outcomes)} outcomes; a turn has at most {MAX_CANDIDATES} candidates"
    return _too_large([prompt for outcome in outcomes for prompt in outcome.prompts], "all candidates")


def round_problem(prompts: Sequence[SeatPrompt]) -> str:
    """Describe the first problem that the prompts of a round have together, or return an empty text."""
    counts = Counter(prompt.seat for prompt in prompts)
    twice = next((seat for seat, count in counts.items() if count > 1), None)
    if twice is not None:
        return f"seat {twice!r:.{NAME_CHARACTERS}} is named twice in a round"
    if len(prompts) > ROUND_SEATS:
        return f"a round of {len(prompts)} seats; at most {ROUND_SEATS} may act at the same time"
    return _too_large(prompts, "a round")


def _too_large(prompts: Sequence[SeatPrompt], whose: str) -> str:
    if (size := sum(map(_size, prompts))) > ROUND_BYTES:
        return f"{size:,} bytes of messages, tools and stops for {whose}; at most {ROUND_BYTES:,} are allowed"
    if (ids := sum(len(prompt.prompt_ids or ()) for prompt in prompts)) > PROMPT_IDS:
        return f"{ids:,} prompt_ids for {whose}; at most {PROMPT_IDS:,} are allowed"
    return ""


def _size(prompt: SeatPrompt) -> int:
    return size_of(prompt.messages, [prompt.tools, prompt.guide], prompt.stop, prompt.prompt_text)


def size_of(
    messages: Sequence[Message], tools: Sequence[Any] = (), stop: Sequence[str] = (), prompt_text: str | None = None
) -> int:
    """Bytes of all that a policy would see, or a chat template could show it: names and calls of tools too.

    Raises TypeError, ValueError, OverflowError or RecursionError for what cannot be sent.
    """
    listed = (tools, stop, prompt_text or "", *(_parts(message) for message in messages))
    images = (part.data for message in messages for part in message.images)
    return len(msgspec.msgpack.encode(listed)) + sum(map(len, images))


def _parts(message: Message) -> tuple[object, ...]:
    return message.role, message.text, message.tool_calls, message.tool_call_id, message.name


def sound_check(errors: list[dict[str, Any]], seats: list[str], about: EnvAbout | None = None) -> EnvCheckReply:
    """As `sound`, of the answer to a check."""
    mistakes = [
        {
            "field": str(error.get("field", "environment"))[:NAME_CHARACTERS],
            "value": value if len(repr(value := error.get("value"))) <= NAME_CHARACTERS else None,
            "problem": str(error.get("problem", ""))[:ERROR_CHARACTERS],
        }
        for error in errors[:MISTAKES]
    ]
    return EnvCheckReply(
        errors=mistakes, seats=known_seats(seats), about=None if about is None else about.within(ABOUT_BYTES)
    )


def known_seats(seats: Sequence[object]) -> list[str]:
    """Return the seats as they may be compared with a spec; none, as if they were unknown, if they are too many or have
    too long names: a part of them would make the others look absent."""
    named = [seat for seat in seats[: KNOWN_SEATS + 1] if isinstance(seat, str) and len(seat) <= NAME_CHARACTERS]
    return named if len(named) == len(seats) <= KNOWN_SEATS else []
