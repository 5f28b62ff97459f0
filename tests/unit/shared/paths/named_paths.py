"""Specs that name places, and two jobs that have some."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.api import SPEC

OWN, OTHER = "j-aaaaaaaaaa", "j-bbbbbbbbbb"
ROW = {"prompt": "p", "completion": "canary-of-blue"}


def named(field: str, text: str) -> dict[str, Any]:
    """A spec with a text in a field."""
    spec = copy.deepcopy(SPEC)
    *parts, last = field.split(".")
    inner: dict[str, Any] = spec
    for part in parts:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[last] = text
    return spec


def sft(path: str, base: str = "some/model") -> dict[str, Any]:
    return {"name": "s", "kind": "sft", "model": {"base": base}, "data": {"path": path}, "train": {"steps": 1}}
