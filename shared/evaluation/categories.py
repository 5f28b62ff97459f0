"""Results of an evaluation by category, read from its metrics: what the API, the page and the command line show."""

from __future__ import annotations

import re
from collections.abc import Mapping

from opentinker.shared.api_types import Category, Estimate

EPISODES = re.compile(r"val/task/(.+)/episodes")


def categories_of(values: Mapping[str, float]) -> list[Category]:
    """Return the categories of val/task/NAME/... by name; none of an evaluation without solved shares, as earlier
    versions made them."""
    names = sorted(found[1] for name in values if (found := EPISODES.fullmatch(name)))
    return [
        Category(
            name=name,
            episodes=round(values[f"val/task/{name}/episodes"]),
            reward=_estimate(values, f"val/task/{name}/reward"),
            solved=_estimate(values, f"val/task/{name}/pass/1"),
        )
        for name in names
        if f"val/task/{name}/pass/1" in values
    ]


def _estimate(values: Mapping[str, float], name: str) -> Estimate:
    return Estimate(value=values[name], low=values.get(f"{name}/low"), high=values.get(f"{name}/high"))
