"""Filters of lists of jobs and sweeps, and changes of labels, as the API takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Lists = Mapping[str, Collection[str] | None]
Texts = Mapping[str, str | None]


def list_query(lists: Lists, texts: Texts) -> dict[str, str]:
    """Return the query of a list: filters with several values, and those with one; without what is not given."""
    query = {name: ",".join(values) for name, values in lists.items() if values}
    return query | {name: text for name, text in texts.items() if text}


def label_changes(lists: Lists, texts: Texts) -> dict[str, Any]:
    """Return the body of a PATCH; what is None stays as it is."""
    changes: dict[str, Any] = {name: list(values) for name, values in lists.items() if values is not None}
    return changes | {name: text for name, text in texts.items() if text is not None}
