"""Reduces an error text to one sentence for a job's reason, where a traceback has no room."""

from __future__ import annotations

import re

_FRAME = re.compile(r'\s*File ".*", line \d+')
_GROUP_BAR = re.compile(r"^\s*\| ?")
"""Before each line of an ExceptionGroup's traceback."""
_HEAD = "Traceback"
_LETTER = re.compile(r"[^\W\d_]")
SENTENCE_CHARACTERS = 400


def error_sentence(error: str) -> str:
    """ "Type: first line" of the last traceback in a text; of another text its first line. Lines without a letter, such
    as frames of asterisks, are skipped. Empty if no line has one."""
    lines = [_GROUP_BAR.sub("", line) for line in error.splitlines()]
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if frames:
        after = lines[frames[-1] + 1 :]
        found = next((at for at, line in enumerate(after) if line and not line[0].isspace()), None)
        lines = lines if found is None else after[found:]
    worded = [line.strip() for line in lines if _LETTER.search(line) and not line.startswith(_HEAD)]
    if not worded:
        return ""
    first = worded[0] if not worded[0].endswith(":") or len(worded) == 1 else f"{worded[0]} {worded[1]}"
    return first if len(first) <= SENTENCE_CHARACTERS else f"{first[:SENTENCE_CHARACTERS]}..."


def error_tail(error: str, characters: int) -> str:
    """The end of a text, with its sentence before it where the end lacks it."""
    if len(error) <= characters:
        return error
    said, end = error_sentence(error), error[-characters:]
    return end if said in end else f"{said}\n...{error[len(said) + 4 - characters :]}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
