"""Limits on the tool descriptions that a server offers to a policy, for every protocol."""

from __future__ import annotations

import re
from typing import Any

from opentinker.shared.types import codec
from opentinker.shared.types.core import Tool

MAX_TOOLS = 64
"""Tools of one server: each is described in every prompt."""
NAME_CHARACTERS = 128
DESCRIPTION_BYTES = 8192
SCHEMA_BYTES = 32 << 10
TOOLS_BYTES = 192 << 10
"""Total size of all descriptions and schemas, which are sent with the first reply of an episode."""
SCHEMA_DEPTH = 32


def bounded_tools(tools: list[Tool]) -> list[Tool]:
    """Return the tools. Raise ValueError if there are none or too many, or if a name repeats or a description or
    schema is too large."""
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"it has {len(tools)} tools; 1 to {MAX_TOOLS} can be offered")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two of its tools have the same name")
    total = 0
    for tool in tools:
        if not (tool.name.isprintable() and re.fullmatch(rf"\S{{1,{NAME_CHARACTERS}}}", tool.name)):
            raise ValueError(
                f"a tool is called {tool.name!r:.80}: a name has 1 to {NAME_CHARACTERS} characters, no blanks"
            )
        if depth_beyond(tool.parameters, SCHEMA_DEPTH):
            raise ValueError(f"the schema of its tool {tool.name!r:.80} is nested deeper than {SCHEMA_DEPTH} levels")
        schema, about = len(codec.encode(tool.parameters)), len(tool.description.encode(errors="replace"))
        total += schema + about
        for what, size, most in (("description", about, DESCRIPTION_BYTES), ("schema", schema, SCHEMA_BYTES)):
            if size > most:
                raise ValueError(
                    f"the {what} of its tool {tool.name!r:.80} has {size:,} bytes; at most {most:,} are taken"
                )
    if total > TOOLS_BYTES:
        raise ValueError(f"its tools are described in {total:,} bytes; at most {TOOLS_BYTES:,} are taken together")
    return tools


def depth_beyond(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested deeper than `most` levels, without descending further."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
