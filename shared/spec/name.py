"""A job's display name: free text for people. Jobs are told apart by their ids."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from opentinker.shared.security.key_text import FORM

MAX_CHARACTERS = 200
JOINERS = "\u200c\u200d"
"""Format characters of ordinary words and emoji; all others reorder or hide their neighbours."""
FORBIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories: control, format, surrogate, line separator, paragraph separator."""


def printable(name: str) -> str:
    """Return a text that a terminal or a table shows as it stands. Raises ValueError for others."""
    if odd := [char for char in name if unicodedata.category(char) in FORBIDDEN_CATEGORIES and char not in JOINERS]:
        raise ValueError(f'has a control character (U+{ord(odd[0]):04X}); e.g. "Qwen3 run 2"')
    if FORM.search(name):
        raise ValueError('holds an API key; revoke that key, and choose another name, e.g. "Qwen3 run 2"')
    return name


DisplayName = Annotated[
    str,
    StringConstraints(strip_whitespace=True),
    Field(min_length=1, max_length=MAX_CHARACTERS),
    AfterValidator(printable),
]


def file_name(name: str) -> str:
    """The part of a path that stands for a job's name: ASCII letters, digits, `.`, `_` and `-`, no leading dot.

    Return a file name for the job's name. Different names may share one: add the job's id or the time.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", plain).strip("-.")[:60] or "job"
