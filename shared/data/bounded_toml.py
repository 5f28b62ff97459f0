"""TOML from people whom nobody trusts: `tomllib` takes memory that grows with the square of a dotted key's parts, and
recurses into brackets.

What somebody might still find is for a process with limits of its own to bear
(`services/scheduler/environments/unpack.py`)."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MOST_PARTS = 16
"""Of a dotted key or of a table's name."""
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\[^\n]){0,99}+"|'[^'\n]{0,99}+')"""
_DOT = r"[ \t]{0,99}+\.[ \t]{0,99}+"
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:{_DOT}{_PART}){{{MOST_PARTS}}}", re.ASCII)
"""Whatever has longer parts, or more space, has too few of them to matter in a text of bounded length."""


def loads(text: str, most_characters: int) -> dict[str, Any]:
    """Raises ValueError, in words."""
    if len(text) > most_characters:
        raise ValueError(f"it has {len(text)} characters, and at most {most_characters} are taken")
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"line {line} has a key of more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
