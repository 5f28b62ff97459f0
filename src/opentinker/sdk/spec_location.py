"""Locates a setting in the text of a spec: mistakes from the server name fields, people need line numbers.

A setting is located by renaming candidates and parsing the text again: the parser of the format confirms the place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentinker.sdk.http import ApiError
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.spec_text import parse_text

MARK = "renamed_to_be_found"
TRIES = 50
"""Places that are tried for one name."""
ABSENT = "does not exist"
"""In the problem of a path that a command at the head of the spec may make."""


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Raises mistakes in the spec of this file, found here or by a server, as SpecError with file, line and column."""
    try:
        yield
    except SpecError as error:
        raise SpecError(with_places(error.mistakes, path)) from None
    except ApiError as error:
        if not error.mistakes:
            raise
        raise SpecError(with_places(error.mistakes, path)) from None


def with_places(mistakes: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Add `file`, `line` and `column` to each mistake: of its field, or of the table that lacks it; and to the problem
    of a path that does not exist the command that makes it, see `command_for`."""
    try:
        text = path.read_text()
        data = parse_text(text, path.suffix)
    except (OSError, ValueError):
        return [dict(mistake) for mistake in mistakes]
    found = []
    for mistake in mistakes:
        place = position(text, path.suffix, data, str(mistake["field"]).split("."))
        where = {} if place is None else {"file": path.name, "line": place[0], "column": place[1]}
        problem = str(mistake.get("problem", ""))
        remedy = {} if (made := command_for(problem, text)) is None else {"problem": f"{problem}. Make it with: {made}"}
        found.append({**mistake, **where, **remedy})
    return found


def command_for(problem: str, text: str) -> str | None:
    """Return the command in the comment at the head of a spec that makes the path which does not exist according to the
    problem; without the commands that follow it in its line."""
    if ABSENT not in problem:
        return None
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    commands = [line.removeprefix("#").partition("&&")[0].strip() for line in head if line.startswith("#  ")]
    made = (
        command
        for command in commands
        for word in command.split()
        if "/" in word and re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", problem)
    )
    return next(made, None)


def position(text: str, suffix: str, data: Any, field: Sequence[str]) -> tuple[int, int] | None:
    """Line and column, from 1, of the setting, else of the innermost table around it; None if there is neither."""
    for length in range(len(field), 0, -1):
        if _at(data, field[: length - 1], field[length - 1]) and (place := _position(text, suffix, field[:length])):
            return place
    return None


def _position(text: str, suffix: str, field: Sequence[str]) -> tuple[int, int] | None:
    *above, name = field
    if name.isdecimal() and above:  # the number of a table in a list
        return _nth(_places(text, suffix, above), int(name))
    return _nth(_places(text, suffix, field), 0)


def _places(text: str, suffix: str, field: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield line and column of the name of this setting; several times for a list of tables."""
    *above, name = field
    for match in itertools.islice(re.finditer(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), TRIES):
        try:
            renamed = parse_text(f"{text[: match.start()]}{MARK}{text[match.end() :]}", suffix)
        except ValueError:
            continue
        if _at(renamed, above, MARK):
            line = text.count("\n", 0, match.start()) + 1
            yield line, match.start() - text.rfind("\n", 0, match.start())


def _nth(places: Iterator[tuple[int, int]], number: int) -> tuple[int, int] | None:
    return next(itertools.islice(places, number, None), None)


def _at(data: Any, above: Sequence[str], name: str) -> bool:
    """Return whether the table at the path `above` contains the name."""
    for part in above:
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return False
    if isinstance(data, list):
        return name.isdecimal() and int(name) < len(data)
    return isinstance(data, dict) and name in data
