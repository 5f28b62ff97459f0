"""The parts of a request's body, read one by one. What is wrong with one is Refused, by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
MAX_STOPS = 16
MAX_TOKEN_ID = 2**31


class InvalidField(Exception):
    """The asker's mistake, or a wish that cannot be met: answered as OpenAI's API answers."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = "") -> None:
        self.message, self.status, self.param, self.code = message, status, param, code
        super().__init__(message)

    @property
    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        named = not self.param or self.param in self.message
        said = self.message if named else f"{self.param}: {self.message}"
        error = {"message": said, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": error}


def too_long(limit: int, size: int, unit: str = "tokens") -> InvalidField:
    """Return the error for a prompt that leaves no room for an answer, or is empty."""
    return InvalidField(
        f"This model's maximum context length is {limit} tokens. However, the prompt has {size} {unit}: there must "
        "be one token, and at least one must be left for the answer.",
        code="context_length_exceeded",
    )


def unknown_model(model: str, known: Iterable[str]) -> InvalidField:
    message = f"The model `{model}` does not exist here; this job has: {', '.join(known)}"
    return InvalidField(message, status=404, param="model", code="model_not_found")


def items(body: Json, name: str) -> list[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidField("must be a list", param=name)
    return value or []


def table(body: Json, name: str) -> Json:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise InvalidField("must be an object", param=name)
    return value


def whole(body: Json, name: str, least: int) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise InvalidField(f"must be a whole number of at least {least}", param=name)
    return value


def flag(body: Json, name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise InvalidField("must be true or false", param=name)
    return bool(value)


def stops(body: Json, name: str = "stop") -> list[str]:
    value = body.get(name)
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or any(not isinstance(stop, str) or not stop for stop in found):
        raise InvalidField("must be a string or a list of strings", param=name)
    if len(found) > MAX_STOPS:
        raise InvalidField(f"can have {MAX_STOPS} strings at most", param=name)
    return found


def token_ids(body: Json, name: str) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not ids or any(type(id) is not int or not 0 <= id < MAX_TOKEN_ID for id in ids):
        raise InvalidField("must be a list of token ids, at least one", param=name)
    return ids


def text(given: Json, name: str, where: str) -> str:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidField("must be a string", param=f"{where}.{name}")
    return value or ""


def number(body: Json, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """`above`: `low` itself is too low."""
    value = body.get(name)
    if value is None:
        return None
    fits = type(value) in (int, float) and low <= value <= high and not (above and value == low)
    if not fits:
        raise InvalidField(
            f"must be a number {'above' if above else 'from'} {low:g} {'up ' * above}to {high:g}", param=name
        )
    return float(value)
