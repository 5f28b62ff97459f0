"""The error tree, and what each kind means for the message, the worker and the HTTP answer.

OpenTinkerError
 |- SpecError        the user's input is wrong: HTTP 422 with every mistake, never retried
 |- NotFound         HTTP 404
 |- Conflict         HTTP 409: the object's state does not allow it
 |- Fenced           a newer epoch owns the job: stop acting for it at once, write nothing
 |- JobFailed        the job cannot go on: state `failed` with this text, leases released
 |- BadImage         an image cannot be shown: its episode fails, or the request with it
"""

from __future__ import annotations

from typing import Any


class OpenTinkerError(Exception):
    """Base of all our errors. `str(error)` says what is wrong and what to do."""


class SpecError(OpenTinkerError):
    """`mistakes`: list of {field, value, problem}."""

    def __init__(self, mistakes: list[dict[str, Any]]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(f"{m['field']}={m['value']!r}: {m['problem']}" for m in mistakes))


class NotFound(OpenTinkerError):
    pass


class Conflict(OpenTinkerError):
    pass


class Fenced(OpenTinkerError):
    pass


class JobFailed(OpenTinkerError):
    pass


class BadImage(OpenTinkerError):
    pass
