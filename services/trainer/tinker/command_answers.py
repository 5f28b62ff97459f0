"""Answers of commands that are not carried out, or not again."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.learners.base import is_out_of_memory
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import Conflict, NotFound
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
    if isinstance(error, Refused | NotFound | Conflict):
        return Failed(error=str(error))
    log.error("command_failed", model=model, seq=seq, exc_info=error)
    if is_out_of_memory(error):
        return Failed(error="the request does not fit into memory; send fewer data, or shorter ones", category="server")
    return Failed(error=f"the request failed: {first_line(error)}", category="server")


def late_answer(command: Command | None, seq: int, model: str, left_out: Iterable[tuple[int, int]]) -> Result:
    """Return what is answered to a command whose number is over, if there is no answer yet. `left_out`: first and last
    numbers that were given up."""
    body = None if command is None else command.body
    for first, last in left_out:
        if first <= seq <= last:
            missing = f"request {first} of model {model} has not come in time, and those after it were given up with it"
            return Failed(error=f"{missing}, up to {last}; send them again under new numbers", lost=True)
    if isinstance(body, Create | Load):
        return Loaded(path=body.path if isinstance(body, Load) else body.start)
    return Failed(error="the request was carried out, and its result is not kept any more", category="server")
