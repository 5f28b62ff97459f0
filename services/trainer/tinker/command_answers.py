"""Results of commands: of the bank, and of those that are not carried out, or not again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from opentinker.services.trainer.bank.limits import BankEnded, Refused
from opentinker.services.trainer.learners.base import is_out_of_memory
from opentinker.shared.asyncio_tools import check_cancelled
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import Conflict, Fenced, NotFound
from opentinker.shared.types.tinker import (
    Answer,
    Command,
    Create,
    Failed,
    ForwardBackward,
    Load,
    Loaded,
    Result,
    Save,
    Skip,
)

log = structlog.get_logger()
T = TypeVar("T")

UNANSWERED = (Fenced, RedisError, BankEnded)
"""End the lease: the next trainer carries out the command."""


async def of_bank(work: Awaitable[T]) -> T:
    """Await what waits for the bank. Raises BankEnded where it has cancelled its commands."""
    try:
        return await work
    except asyncio.CancelledError:
        check_cancelled()
        raise BankEnded("the adapter bank of this trainer has ended") from None


async def result_of(work: Awaitable[Result], model: str, seq: int) -> Result:
    """Await the result of a command; an error is one, too. Raises UNANSWERED."""
    try:
        return await of_bank(work)
    except UNANSWERED:
        raise
    except Exception as error:  # noqa: BLE001 - the command is answered with it; the others are not affected
        return failure(error, model, seq)


def ready(result: Result) -> asyncio.Future[Result]:
    """Return what has this result already."""
    found: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    found.set_result(result)
    return found


def needs_no_repetition(command: Command, known: Answer) -> bool:
    """Return whether a command that was answered before has left nothing in the model, so that it need not be carried
    out again."""
    body = command.body
    if isinstance(known.result, Failed) and known.result.lost:
        return True
    if isinstance(body, ForwardBackward):
        return not body.backward or isinstance(known.result, Failed)
    return isinstance(body, Save | Skip)


def failure(error: Exception, model: str, seq: int) -> Failed:
    if isinstance(error, Refused | NotFound | Conflict) and not isinstance(error.__cause__, OSError):
        return Failed(error=str(error))
    log.error("command_failed", model=model, seq=seq, exc_info=error)
    if is_out_of_memory(error):
        return Failed(error="the request does not fit into memory; send fewer data, or shorter ones", category="server")
    return Failed(error=f"the request failed: {problem_of(error)}", category="server")


def problem_of(error: BaseException) -> str:
    """Return the first line of an error; of an error of the disk what it is, without the place."""
    of_disk = error if isinstance(error, OSError) else error.__cause__
    if isinstance(of_disk, FileNotFoundError):  # that of safetensors has no `strerror`
        return "a file does not exist"
    return of_disk.strerror if isinstance(of_disk, OSError) and of_disk.strerror else first_line(error)


def late_answer(command: Command | None, seq: int, model: str, left_out: Iterable[tuple[int, int]]) -> Result:
    """Return what is answered to a command whose number is over, if there is no answer yet. `left_out`: first and last
    numbers that were given up."""
    body = None if command is None else command.body
    for first, last in left_out:
        if first <= seq <= last:
            missing = f"request {first} of model {model} has not come in time, and those after it were given up with it"
            return Failed(error=f"{missing}, up to {last}; send them again under new numbers", lost=True)
    if isinstance(body, Create | Load):
        return Loaded(path=body.path if isinstance(body, Load) else "")
    return Failed(error="the request was carried out, and its result is not kept any more", category="server")
