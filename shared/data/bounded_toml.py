"""Parses TOML from untrusted sources: `tomllib` uses memory quadratic in a dotted key's parts, and recurses into
brackets.

Remaining ways to exhaust resources are bounded by a process with limits
(`services/scheduler/environments/unpack.py`)."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_PARTS = 16
"""Parts of a dotted key or of a table's name."""
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\[^\n]){0,99}+"|'[^'\n]{0,99}+')"""
_DOT = r"[ \t]{0,99}+\.[ \t]{0,99}+"
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:{_DOT}{_PART}){{{MAX_PARTS}}}", re.ASCII)
"""Whatever has longer parts, or more space, has too few of them to matter in a text of bounded length."""


def loads(text: str, most_characters: int) -> dict[str, Any]:
    """Parse bounded TOML. Raises ValueError with a readable message."""
    if len(text) > most_characters:
        raise ValueError(f"it has {len(text)} characters, and at most {most_characters} are taken")
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"line {line} has a key of more than {MAX_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
