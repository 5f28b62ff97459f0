"""Example episodes of built-in environments, for people who look before they train: `envs/examples.json`, which
`python -m examples.record_episodes` writes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict

FILE = Path(__file__).with_name("examples.json")


class Example(TypedDict):
    """An episode, or a note on what an episode needs that is not here."""

    played: NotRequired[str]
    """Who played it, and with which config."""
    transcript: NotRequired[str]
    note: NotRequired[str]


@cache
def examples() -> dict[str, Example]:
    """Return the examples by name. Blocking the first time."""
    found: dict[str, Example] = json.loads(FILE.read_bytes())
    return found


def example_of(name: str) -> str:
    """Return the example of a built-in environment as text; empty for any other name."""
    if ":" in name or (found := examples().get(name)) is None:
        return ""
    return found.get("note") or f"{found['played']}\n\n{found['transcript']}"
