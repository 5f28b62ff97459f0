"""A job's labels for people: display name, project, tags and notes. All of them can be changed later, since a job is
identified by its id."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from opentinker.shared.security.key_text import FORM
from opentinker.shared.spec.base import SpecPart
from opentinker.shared.types.core import LABELS, MAX_TAGS

MAX_CHARACTERS = 200
JOINERS = "\u200c\u200d"
"""Format characters of ordinary words and emoji; all others reorder or hide their neighbours."""
FORBIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories: control, format, surrogate, line separator, paragraph separator."""
MAX_NOTES = 10_000
SEPARATORS = ","
"""Separates tags in queries, options and tables."""


def printable(name: str) -> str:
    """Return a text that a terminal or a table shows as it stands. Raises ValueError for others."""
    if odd := [char for char in name if unicodedata.category(char) in FORBIDDEN_CATEGORIES and char not in JOINERS]:
        raise ValueError(f'has a control character (U+{ord(odd[0]):04X}); e.g. "Qwen3 run 2"')
    if FORM.search(name):
        raise ValueError('holds an API key; revoke that key, and choose another name, e.g. "Qwen3 run 2"')
    return name


def _tag(text: str) -> str:
    """Raises ValueError."""
    if any(char in text for char in SEPARATORS):
        raise ValueError("holds a comma, which separates tags")
    return printable(text)


def _once(tags: list[str]) -> list[str]:
    """Return each tag once, in the order of their first mention."""
    return list(dict.fromkeys(tags))


def _notes(text: str) -> str:
    """Raises ValueError."""
    printable(text.replace("\n", " ").replace("\t", " "))
    return text


DisplayName = Annotated[
    str,
    StringConstraints(strip_whitespace=True),
    Field(min_length=1, max_length=MAX_CHARACTERS),
    AfterValidator(printable),
]
Project = Annotated[str, StringConstraints(strip_whitespace=True), Field(max_length=100), AfterValidator(printable)]
Tag = Annotated[str, StringConstraints(strip_whitespace=True), Field(min_length=1, max_length=50), AfterValidator(_tag)]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS), AfterValidator(_once)]
Notes = Annotated[str, Field(max_length=MAX_NOTES), AfterValidator(_notes)]


def file_name(name: str) -> str:
    """Return a file name for a job's name: ASCII letters, digits, `.`, `_` and `-`, no leading dot. Different names may
    share one: add the job's id or the time."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", plain).strip("-.")[:60] or "job"


class LabelChanges(SpecPart):
    """The body of PATCH /v1/jobs/{id}: what is not given stays."""

    name: DisplayName | None = None
    """Display name."""
    project: Project | None = None
    """Project; the empty text takes the job out of its project."""
    tags: Tags | None = None
    """All tags; they replace those that the job has."""
    add_tags: Tags | None = None
    """Tags to add."""
    remove_tags: Tags | None = None
    """Tags to remove; those that the job does not have are ignored."""
    notes: Notes | None = None
    """Notes."""

    @classmethod
    def written(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Tags are replaced, or some are added and removed."""
        both = [name for name in ("add_tags", "remove_tags") if data.get("tags") is not None and data.get(name)]
        return [{"field": name, "value": data[name], "problem": "does not go with tags"} for name in both]

    def values(self) -> dict[str, Any]:
        """Return the new values of those labels that are replaced."""
        return {name: value for name in LABELS if (value := getattr(self, name)) is not None}
