"""Lists the rows of an environment, for people to read: in a thread of the env worker, or in a child process where
sessions would be played in one. User code: every exception is an answer."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from opentinker.envs.base import DataRows
from opentinker.envs.registry import check
from opentinker.envs.tools import tools_of
from opentinker.shared.messaging.reply_validation import ERROR_CHARACTERS, NAME_CHARACTERS, size_of
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import MAX_ROWS, EnvRow, EnvRows, EnvRowsReply
from opentinker.shared.types.error_text import error_sentence, error_tail
from opentinker.shared.types.errors import SpecError

MAX_SEARCHED = 100_000
"""Rows that one request searches."""
SEARCH_S = 8.0
"""A search ends after this time with the rows found so far."""
PROMPT_BYTES = 128 * 1024
"""Longer prompts are not sent."""
PLACE_CHARACTERS = 300


def list_rows(name: str, request: EnvRows, *, modules: bool, reply_bytes: int = 1 << 20) -> EnvRowsReply:
    """Answer a request. `name`: of the environment in this process; `reply_bytes`: of all messages. Blocking."""
    try:
        found, settings = check(name, request.config or {}, modules=modules)
        rows = found.data_rows(settings)
        if rows is None:
            return EnvRowsReply()
        count = min(len(rows), MAX_ROWS)
        matching, searched = _search(rows, count, request.text) if request.text else ([], 0)
        return EnvRowsReply(
            count=count,
            found=matching,
            searched=searched,
            rows=list(_prompts(rows, [number for number in request.numbers if 0 <= number < count], reply_bytes)),
            tools=[offered.tool for offered in tools_of(found(settings))],
        )
    except SpecError as error:
        return EnvRowsReply(problem="; ".join(f"{m['field']}: {m['problem']}" for m in error.mistakes))
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit() in it ends its listing, not the worker
        return EnvRowsReply(problem=_sentence(error))


def _search(rows: DataRows, count: int, text: str) -> tuple[list[int], int]:
    """Return the rows with a text in their prompt or place, and how many were searched."""
    wanted, until, number = text.casefold(), time.monotonic() + SEARCH_S, 0
    found: list[int] = []
    for number in range(min(count, MAX_SEARCHED)):
        if time.monotonic() > until:
            return found, number
        try:
            words = [rows.place(number), *(message.text for message in rows.prompt(number))]
        except Exception:  # noqa: BLE001 - user code: a row that cannot be played has no text to be found
            continue
        if any(wanted in word.casefold() for word in words):
            found.append(number)
    return found, min(count, MAX_SEARCHED)


def _prompts(rows: DataRows, numbers: list[int], room: int) -> Iterator[EnvRow]:
    """Give the rows that fit into one reply, at least the first."""
    for number in numbers:
        row = _row(rows, number)
        room -= size_of(row.messages)
        if room < 0 and number != numbers[0]:
            return
        yield row


def _row(rows: DataRows, number: int) -> EnvRow:
    try:
        place = str(rows.place(number))[:PLACE_CHARACTERS]
        given = [_without_images(message) for message in rows.prompt(number)]
        messages = [message for message, _ in given]
        if (size := size_of(messages)) > PROMPT_BYTES:
            problem = f"the prompt has {size:,} bytes; at most {PROMPT_BYTES:,} are shown"
            return EnvRow(number=number, place=place, problem=problem)
        return EnvRow(number=number, place=place, messages=messages, images=sum(images for _, images in given))
    except Exception as error:  # noqa: BLE001 - user code: a row that cannot be played is shown with the reason
        return EnvRow(number=number, problem=_sentence(error))


def _without_images(message: Message) -> tuple[Message, int]:
    """Return the message with a text in place of each image, and their number."""
    if not message.images:
        return message, 0
    said = [f"[image, {len(image.data)} bytes]" for image in message.images]
    return msgspec.structs.replace(message, content="".join([*said, message.text])), len(said)


def _sentence(error: BaseException) -> str:
    said = error_sentence("".join(traceback.format_exception_only(error)))
    return error_tail(said, ERROR_CHARACTERS).encode(errors="replace").decode()


def sound_rows(reply: EnvRowsReply | None, request: EnvRows) -> EnvRowsReply:
    """Return the answer of an untrusted process within bounds. Decoding has checked its types."""
    if reply is None:
        return EnvRowsReply(problem="the environment's process gave no answer")
    if reply.problem or reply.count is None:
        return EnvRowsReply(problem=reply.problem[:ERROR_CHARACTERS])
    count = max(0, min(reply.count, MAX_ROWS))
    wanted = set(request.numbers)
    rows = [_bounded(row) for row in reply.rows if row.number in wanted and size_of(row.messages) <= PROMPT_BYTES]
    return EnvRowsReply(
        count=count,
        found=sorted({number for number in reply.found if 0 <= number < count})[:MAX_SEARCHED],
        searched=max(0, min(reply.searched, count)),
        rows=rows,
        tools=[tool for tool in reply.tools if len(tool.name) <= NAME_CHARACTERS],
    )


def _bounded(row: EnvRow) -> EnvRow:
    changes: dict[str, Any] = {"place": row.place[:PLACE_CHARACTERS], "problem": row.problem[:ERROR_CHARACTERS]}
    return msgspec.structs.replace(row, images=max(0, row.images), **changes)
