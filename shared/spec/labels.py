"""What people call a job and note about it: display name, project, tags and notes. All can be changed later."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.spec.name import DisplayName, printable
from opentinker.shared.types.core import LABELS, MAX_TAGS

MAX_NOTES = 10_000
SEPARATORS = ","
"""Separates tags in queries, options and tables."""


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


Project = Annotated[str, StringConstraints(strip_whitespace=True), Field(max_length=100), AfterValidator(printable)]
Tag = Annotated[str, StringConstraints(strip_whitespace=True), Field(min_length=1, max_length=50), AfterValidator(_tag)]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS), AfterValidator(_once)]
Notes = Annotated[str, Field(max_length=MAX_NOTES), AfterValidator(_notes)]


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
