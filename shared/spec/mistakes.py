"""Mistakes in a job spec: {field, value, problem} each, found by pydantic or by validators of ours."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from pydantic import BaseModel


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


def fill(model: BaseModel, values: dict[str, Any]) -> None:
    """Set fields of a frozen model while it is being validated."""
    for name, value in values.items():
        object.__setattr__(model, name, value)


def mistakes_of(item: Any) -> list[dict[str, Any]]:
    """One of pydantic's errors as ours; a validator of ours may have found several."""
    path = [str(part) for part in item["loc"]]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Mistakes):
        return [{**m, "field": ".".join([*path, m["field"]]), "value": _short(m["value"])} for m in cause.mistakes]
    problem = item["msg"].removeprefix("Value error, ")
    return [{"field": ".".join(path) or "(whole spec)", "value": _short(item.get("input")), "problem": problem}]


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 200 else text[:200] + "..."
