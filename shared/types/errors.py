"""The error tree, and what each kind means for the message, the worker and the HTTP answer.

OpenTinkerError
 |- SpecError        the user's input is wrong: HTTP 422 with every mistake, never retried
 |- NotFound         HTTP 404
 |- Conflict         HTTP 409: the object's state does not allow it
 |- Fenced           a newer epoch owns the job: stop acting for it immediately, write nothing
 |- JobFailed        the job cannot go on: state `failed` with this text, leases released
 |- TransportError   weights did not arrive: their swap fails, generation continues with the old ones
 |- RestartNeeded    the trainer has recorded where the next one continues: its process starts again, no failure
 |- BadImage         an image cannot be shown: its episode fails, or the request with it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OpenTinkerError(Exception):
    """Base of all our errors. `str(error)` says what is wrong and what to do."""


class SpecError(OpenTinkerError):
    """`mistakes`: list of {field, value, problem}, some with `suggestion`: what to write instead. Those of a file whose
    text was looked at have `file`, `line` and `column` too."""

    def __init__(self, mistakes: list[dict[str, Any]]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(map(described, mistakes)))

    @classmethod
    def of(cls, field: str, value: object, problem: str) -> SpecError:
        """Return the error of one mistake."""
        return cls([{"field": field, "value": value, "problem": problem}])


def described(mistake: Mapping[str, Any]) -> str:
    """`train.lr = -1: must be 0 or more (job.toml:14)`; without the value where that says nothing."""
    value, problem = mistake["value"], str(mistake["problem"])
    told = value is None or problem.startswith("unknown setting")
    where = f" ({mistake['file']}:{mistake['line']})" if "line" in mistake else ""
    return f"{mistake['field']}{'' if told else f' = {value!r}'}: {problem}{where}"


def plural(count: int, noun: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class NotFound(OpenTinkerError):
    pass


class Conflict(OpenTinkerError):
    pass


class Fenced(OpenTinkerError):
    pass


class JobFailed(OpenTinkerError):
    pass


class RestartNeeded(OpenTinkerError):
    pass


class BadImage(OpenTinkerError):
    pass


class TransportError(OpenTinkerError):
    """The weight group could not be formed, a peer is gone or too slow, or the bytes are not what was announced."""
