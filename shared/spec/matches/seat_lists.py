"""Named lists of seats in a spec: `red = ["r1", "r2"]`, or `red = ["red_*"]`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field

from opentinker.shared.types.mistakes import mistake

MAX_LISTS = 64
MAX_SEATS = 64
"""Entries of one list."""
MAX_ENTRIES = 1024
"""Entries of all lists together: each is compared with every seat of the environment."""
ListName = Annotated[str, Field(min_length=1, max_length=100)]
SeatEntry = Annotated[str, Field(min_length=1, max_length=100)]
"""The name of a seat, or a pattern with `*`, `?` or `[...]`."""
SeatLists = Annotated[
    dict[ListName, Annotated[list[SeatEntry], Field(min_length=1, max_length=MAX_SEATS)]],
    Field(min_length=1, max_length=MAX_LISTS),
]


def list_of(lists: Mapping[str, list[str]], seat: str) -> str | None:
    """Return the name of the list that a seat is in: the one with its own name, else the first with a pattern that
    matches."""
    own = (name for name, entries in lists.items() if seat in entries)
    matching = (name for name, entries in lists.items() if any(fnmatchcase(seat, entry) for entry in entries))
    return next(own, next(matching, None))


def are_team(teams: Mapping[str, list[str]], seats: Iterable[str]) -> bool:
    """Return whether all these seats are in one team."""
    found = {list_of(teams, seat) for seat in seats}
    return len(found) == 1 and None not in found


def play_themselves(teams: Mapping[str, list[str]], seats: Collection[str]) -> bool:
    """Return whether a policy that plays these seats plays against itself: several that are no team."""
    return len(seats) > 1 and not are_team(teams, seats)


def is_pattern(seat: str) -> bool:
    return any(sign in seat for sign in "*?[")


def settle_lists(field: str, lists: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Return the entries that stand in two places, and the lists that can never hold two seats; or that there are more
    entries than MAX_ENTRIES."""
    if (count := sum(map(len, lists.values()))) > MAX_ENTRIES:
        return [mistake(field, count, f"names {count:,} seats; at most {MAX_ENTRIES:,} may be")]
    found: list[dict[str, Any]] = []
    first: dict[str, str] = {}
    for name, entries in lists.items():
        for entry in entries:
            if entry in first:
                where = "twice" if first[entry] == name else f"and in {field}.{first[entry]}"
                found.append(mistake(f"{field}.{name}", entry, f"names this seat {where}"))
            first.setdefault(entry, name)
        if len(entries) == 1 and not is_pattern(entries[0]):
            problem = "names one seat alone: two or more, or a pattern, e.g. 'player_*'"
            found.append(mistake(f"{field}.{name}", entries, problem))
    return found
