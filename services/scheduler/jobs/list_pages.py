"""Pages of a filtered or sorted list of jobs or sweeps. A cursor carries the place where its page ended, so that the
next page continues there even if the last job has since changed, left the filter or been deleted."""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from opentinker.services.scheduler.jobs.list_query import Listed, ListQuery
from opentinker.shared.state.list_rows import ListRow
from opentinker.shared.types.errors import SpecError

SEPARATOR = "."
"""Between the id of a page's last job and its place; a cursor without a place is an id alone."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in an order: what its last row had then."""

    sort: str
    key: float | str | tuple[bool, str]
    created: float
    id: str

    @classmethod
    def of(cls, row: ListRow, wanted: ListQuery) -> Place:
        return cls(wanted.sort, wanted.key(row), row.created, row.id)


class ListPage(NamedTuple):
    ids: list[str]
    cursor: str
    more: bool


def page_of(rows: Sequence[ListRow], wanted: ListQuery, before: str, limit: int, what: Listed) -> ListPage:
    """Return the page that follows the cursor `before`, the first one without it. `rows`: all of the tenant, newest
    first. Raises SpecError."""
    chosen = wanted.chosen(rows)
    start = _start(rows, chosen, wanted, before, what) if before else 0
    shown = chosen[start : start + limit]
    cursor = _cursor(shown[-1], wanted) if shown else before
    return ListPage([row.id for row in shown], cursor, len(chosen) > start + limit)


def id_of(cursor: str) -> str:
    """Return the id of the job or sweep that the cursor's page ended with."""
    return cursor.partition(SEPARATOR)[0]


def unknown_cursor(before: str, what: Listed) -> SpecError:
    problem = f"is not one of the listed {what.noun}s; use the cursor of the last answer, or start again without one"
    return SpecError.of("before", before[:100], problem)


def _cursor(row: ListRow, wanted: ListQuery) -> str:
    place = base64.urlsafe_b64encode(msgspec.json.encode(Place.of(row, wanted))).decode().rstrip("=")
    return f"{row.id}{SEPARATOR}{place}"


def _start(rows: Sequence[ListRow], chosen: Sequence[ListRow], wanted: ListQuery, before: str, what: Listed) -> int:
    id, _, encoded = before.partition(SEPARATOR)
    try:
        place = _decoded(encoded) if encoded else None
        if place is None or place.sort != wanted.sort:
            place = next((Place.of(row, wanted) for row in rows if row.id == id), None)
        if place is None:
            raise unknown_cursor(before, what)
        return bisect_left(chosen, True, key=lambda row: _is_behind(row, place, wanted))
    except (ValueError, TypeError, msgspec.MsgspecError):  # no page of ours ended with this cursor
        raise unknown_cursor(before, what) from None


def _decoded(encoded: str) -> Place:
    padded = encoded + "=" * (-len(encoded) % 4)
    return msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=Place)


def _is_behind(row: ListRow, place: Place, wanted: ListQuery) -> bool:
    key = wanted.key(row)
    if key != place.key:
        return bool(key < place.key if wanted.sort.startswith("-") else key > place.key)
    return (row.created, row.id) < (place.created, place.id)  # equal ones: the newest first
