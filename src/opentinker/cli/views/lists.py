"""What commands that list jobs or sweeps share: their order, counts for `--group`, and what is said of a cut list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from opentinker.cli.common import complain, print_found
from opentinker.sdk.job_text import on_one_line
from opentinker.shared.types.core import JobState

RUNNING_FIRST = "state"
MOST_COUNTED = 10_000
"""Groups count this many jobs or sweeps, the newest."""


def say_if_cut(
    found: Sequence[object],
    limit: int,
    noun: str,
    groups: Callable[[], Sequence[Any]] | None = None,
    *,
    which: Literal["first", "newest"] = "first",
) -> None:
    """Say on stderr that a list is cut if more than `limit` were found. `groups`: asks for the counts of all. `which`:
    those that are shown."""
    if len(found) <= limit:
        return
    shown = f"{limit:,} {noun}" + ("s" if limit > 1 else "")
    if groups is not None:
        total = sum(one[f"{noun}s"] for one in groups())
        shown = f"{limit:,} of {total:,}{' or more' if total >= MOST_COUNTED else ''} {noun}s"
    complain(f"the {which} {shown}; -n for more")


def print_groups(groups: Sequence[Mapping[str, Any]], noun: Literal["job", "sweep"], by: str, as_json: bool) -> None:
    """`groups`: as the API has them."""
    many = f"{noun}s"
    rows = [[on_one_line(one["name"]) or "-", one[many], _counted(one["states"])] for one in groups]
    print_found(groups, as_json, [by, many, "states"], rows, empty=f"no such {noun}")


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in JobState if state in states)
