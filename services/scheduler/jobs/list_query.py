"""Selects, sorts and counts a tenant's jobs or sweeps for a list, as the request's query asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from opentinker.shared.state.list_rows import ListRow
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.sweeps import SweepState

LONGEST = 200
"""Characters of a filter, and of tags and notes that a list is sorted by: cursors carry them."""
EQUAL: dict[str, Callable[[ListRow], str]] = {
    "environment": lambda row: row.environment,
    "model": lambda row: row.model,
    "project": lambda row: row.project,
    "owner": lambda row: row.key,
}
"""Filters by one value, and what of a row it is compared with."""
EXACT: dict[str, Callable[[ListRow], str]] = {
    "name_is": lambda row: row.name,
    "notes_is": lambda row: _first_line(row.notes),
    **EQUAL,
}
"""The same, with those by the whole name and by the first line of the notes: `name` and `notes` find a part."""


def _first_line(notes: str) -> str:
    return notes.partition("\n")[0][:LONGEST]


def _folded(name: str, row: ListRow) -> tuple[bool, str]:
    return _empty_last(EQUAL[name](row))


def _empty_last(text: str) -> tuple[bool, str]:
    return not text, text.casefold()


def _alone(name: str, row: ListRow) -> tuple[str]:
    return (EQUAL[name](row),)


RUNNING_FIRST = (JobState.RUNNING, JobState.STARTING, JobState.QUEUED, JobState.PAUSED)
ORDERS: dict[str, Callable[[ListRow], Any]] = {
    "created": lambda row: -row.created,
    "updated": lambda row: -row.updated,
    "finished": lambda row: -row.finished,
    "step": lambda row: -row.step,
    "name": lambda row: row.name.casefold(),
    "tag": lambda row: _empty_last(", ".join(sorted(row.tags, key=str.casefold))[:LONGEST]),
    "notes": lambda row: _empty_last(row.notes[:LONGEST]),
    "kind": lambda row: row.kind,
    "state": lambda row: RUNNING_FIRST.index(row.state) if row.state in RUNNING_FIRST else len(RUNNING_FIRST),
    **{name: partial(_folded, name) for name in EQUAL},
}
"""By the name of `sort`. Times and steps: the largest first; texts: empty ones last; equal ones: the newest first."""


class Listed(NamedTuple):
    """A kind of list, and the fields by which it can be filtered and sorted."""

    noun: str
    states: tuple[str, ...]
    kinds: tuple[str, ...]
    orders: tuple[str, ...]


JOBS = Listed(
    "job",
    tuple(state.value for state in JobState),
    ("rl", "sft", "dpo", "inference", "eval", "tinker"),
    tuple(ORDERS),
)
SWEEPS = Listed(
    "sweep",
    tuple(state.value for state in SweepState),
    ("rl", "sft", "dpo", "eval"),
    tuple(name for name in ORDERS if name != "step"),
)
GROUPED: dict[str, Callable[[ListRow], Iterable[str]]] = {
    "state": lambda row: (row.state.value,),
    "kind": lambda row: (row.kind,),
    "name": lambda row: (row.name,),
    "tag": lambda row: row.tags or ("",),
    "notes": lambda row: (_first_line(row.notes),),
    **{name: partial(_alone, name) for name in EQUAL},
}


class ListQuery(NamedTuple):
    """Filters, and the order of what they let through."""

    states: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    name: str = ""
    notes: str = ""
    equal: tuple[tuple[str, str], ...] = ()
    tags: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    sort: str = "created"

    @classmethod
    def of(cls, query: Mapping[str, str], what: Listed = JOBS) -> ListQuery:
        """Raises SpecError."""
        for name in ("search", "name", "notes", "tag", *EXACT):
            if len(query.get(name, "")) > LONGEST:
                raise SpecError.of(name, query[name][:100], f"must be {LONGEST} characters at most")
        states, sort = _parts(query.get("state", "")), query.get("sort", "created")
        kinds = _parts(query.get("kind", ""))
        for name, given, allowed in (("state", states, what.states), ("kind", kinds, what.kinds)):
            if unknown := sorted(given - set(allowed)):
                problem = f"must be one of {', '.join(allowed)}, or several with commas"
                raise SpecError.of(name, unknown[0][:100], problem)
        if sort.removeprefix("-") not in what.orders:
            known = ", ".join(what.orders)
            raise SpecError.of("sort", sort[:100], f"must be one of {known}, reversed by a leading -")
        equal = tuple((name, query[name]) for name in EXACT if query.get(name))
        words = tuple(query.get("search", "").lower().split())
        name, notes = (query.get(field, "").casefold() for field in ("name", "notes"))
        return cls(states, kinds, name, notes, equal, _parts(query.get("tag", "")), words, sort)

    @property
    def plain(self) -> bool:
        """Return whether the query asks for all of them, newest first."""
        return self == ListQuery()

    def chosen(self, rows: Iterable[ListRow]) -> list[ListRow]:
        """Return the rows that pass the filters, sorted. `rows`: newest first."""
        found = [row for row in rows if self._wants(row)]
        return sorted(found, key=self.key, reverse=self.sort.startswith("-"))

    def key(self, row: ListRow) -> Any:
        """Return what the rows are sorted by."""
        return ORDERS[self.sort.removeprefix("-")](row)

    def _wants(self, row: ListRow) -> bool:
        return (
            (not self.states or row.state in self.states)
            and (not self.kinds or row.kind in self.kinds)
            and self.name in row.name.casefold()
            and self.notes in row.notes.casefold()
            and all(EXACT[name](row) == value for name, value in self.equal)
            and self.tags <= set(row.tags)
            and (not self.words or self._is_found(row))
        )

    def _is_found(self, row: ListRow) -> bool:
        text = _text(row)
        return all(word in text for word in self.words)


def _parts(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _text(row: ListRow) -> str:
    """Return the text that a search matches."""
    told = (row.id, row.name, row.kind, row.model, row.environment, row.key, row.project, *row.tags, row.notes)
    return " ".join(told).lower()


def groups_of(rows: Iterable[ListRow], by: str, what: Listed) -> list[dict[str, Any]]:
    """Return the jobs or sweeps of each value, counted by state; the largest group first. One counts for each tag."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for name in GROUPED[by](row):
            counts.setdefault(name, Counter())[row.state.value] += 1
    found = sorted(counts.items(), key=lambda one: (-one[1].total(), one[0]))
    return [{"name": name, f"{what.noun}s": states.total(), "states": dict(states)} for name, states in found]
