"""What `opentinker jobs` and `opentinker sweeps` share: their order, and the counts that `--group` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from opentinker.cli.common import print_found
from opentinker.sdk.job_text import on_one_line
from opentinker.shared.types.core import JobState

RUNNING_FIRST = "state"


def print_groups(groups: Sequence[Mapping[str, Any]], noun: Literal["job", "sweep"], by: str, as_json: bool) -> None:
    """`groups`: as the API has them."""
    many = f"{noun}s"
    rows = [[on_one_line(one["name"]) or "-", one[many], _counted(one["states"])] for one in groups]
    print_found(groups, as_json, [by, many, "states"], rows, empty=f"no such {noun}")


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in JobState if state in states)
