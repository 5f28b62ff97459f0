"""Mistakes in a job spec: {field, value, problem} each, and `suggestion` where there is one: what to write instead, a
setting's name, a value or a line of TOML. Found by pydantic or by validators of ours."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

K = TypeVar("K")
P = TypeVar("P", bound=BaseModel)

WHOLE = "(whole spec)"
"""Stands for the field where a mistake is about all of them."""
UNKNOWN = "unknown setting"
IS_NEEDED = "is needed"
NO_TABLE = "must be a table"
PATTERNS = {
    r"^[a-z][a-z0-9_]{0,31}$": "must begin with a small letter and go on with small letters, digits and _, 32 in all",
}
"""What names of a pattern look like, in words."""
KEY = "[key]"
"""Last part of pydantic's path to the name of an entry."""
MAX_VALUE_CHARACTERS = 80
"""Characters of a value that a mistake shows."""


Mistake = dict[str, Any]


def mistake(field: str, value: object, problem: str) -> Mistake:
    return {"field": field, "value": value, "problem": problem}


def is_unknown(mistake: Mapping[str, Any], fields: Collection[str]) -> bool:
    """Return whether it says that one of these settings is unknown."""
    return mistake.get("field") in fields and str(mistake.get("problem", "")).startswith(UNKNOWN)


class Mistakes(ValueError):
    """Several mistakes found by one validator; `mistakes_of` gives each its own field."""

    def __init__(self, mistakes: list[dict[str, Any]]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(f"{m['field']}: {m['problem']}" for m in mistakes))


def unused(part: BaseModel, usual: BaseModel, ignored: Set[str], by: str) -> list[dict[str, Any]]:
    """The ignored fields that have another than their usual value."""
    return [
        {"field": name, "value": getattr(part, name), "problem": f"does not apply to {by}"}
        for name in type(part).model_fields
        if name in ignored and getattr(part, name) != getattr(usual, name)
    ]


def written(data: Any, *names: str) -> Any:
    """The value in nested tables of a spec as it was sent; None if it or a table is missing."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def right_parts(model: type[P], parts: Mapping[K, Any]) -> dict[K, P]:
    """The parts of a spec as it was sent that are right in themselves; the others are among the mistakes already."""
    found = {}
    for key, part in parts.items():
        with contextlib.suppress(ValidationError):
            found[key] = model.model_validate(part)
    return found


def fill(model: BaseModel, values: dict[str, Any]) -> None:
    """Set fields of a frozen model while it is being validated."""
    for name, value in values.items():
        object.__setattr__(model, name, value)


def mistakes_of(item: Any, data: Any = None) -> list[dict[str, Any]]:
    """One of pydantic's errors as ours; a validator of ours may have found several. `data`: what was validated, which
    tells the names of settings from pydantic's names for the branches of a union."""
    path = [str(part) for part in _written(item["loc"], data)]
    path = path[:-1] if path[-1:] == [KEY] else path
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Mistakes):
        return [{**m, "field": ".".join([*path, m["field"]]), "value": short(m["value"])} for m in cause.mistakes]
    field = ".".join(path) or WHOLE
    if item["type"] == "missing":
        return [mistake(field, None, IS_NEEDED)]
    found = mistake(field, short(item.get("input")), _problem(item))
    allowed = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
    if near := nearest(item.get("input"), allowed):
        found |= {"problem": f"{found['problem']}; did you mean {near!r}?", "suggestion": near}
    return [found]


def without_branches(mistakes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One mistake for a field of several types, of which each has refused the value."""
    found: dict[str, dict[str, Any]] = {}
    for each in mistakes:
        one = found.setdefault(each["field"], dict(each))
        other = str(each["problem"])
        if other not in one["problem"]:
            one["problem"] += f" or {other.removeprefix('must be ')}" if other.startswith("must be ") else f"; {other}"
    return list(found.values())


def nearest(name: Any, known: Sequence[str]) -> str | None:
    """The known name that was probably meant."""
    if not isinstance(name, str) or len(name) > 2 * max(map(len, known), default=0):
        return None  # too long for a ratio of 0.7: comparing a megabyte would hold up the event loop
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return next(iter(difflib.get_close_matches(plain, known, 1, 0.7)), None)


def short(value: Any) -> Any:
    """The value, or how it begins if it is long."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "..."


def _problem(item: Any) -> str:
    match item["type"]:
        case "extra_forbidden":
            return UNKNOWN
        case "model_type" | "dict_type" | "model_attributes_type":
            return NO_TABLE
        case "string_type":
            return "must be a text"
        case "string_pattern_mismatch" if item["ctx"]["pattern"] in PATTERNS:
            return PATTERNS[item["ctx"]["pattern"]]
    text = str(item["msg"]).removeprefix("Value error, ").partition(", unable to ")[0]
    return re.sub(r"^(Input|String|List|Dictionary) should ", "must ", text)


def _written(loc: Sequence[int | str], data: Any) -> list[int | str]:
    """Return the part of pydantic's path that was written in the data; its last name may be missing or unknown
    there."""
    if not isinstance(data, dict):
        return list(loc)
    found: list[int | str] = []
    at: Any = data
    for part in loc:
        if isinstance(at, dict):
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part] if part < len(at) else None
        else:  # a branch of a union
            break
        found.append(part)
    return found
