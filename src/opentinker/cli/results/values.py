"""Values of an evaluation for people: each with its interval, the main ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAIN = ("val/exact", "val/pass/1", "val/reward/mean")
"""Values of an evaluation of which the first one that it has stands for it in lists."""
LARGE = 10_000
"""Values from which on fractions are left out."""
BOUNDS = ("low", "high")
CATEGORY = "val/task/"


def names_of(values: Mapping[str, float]) -> list[str]:
    """Return the metrics, without the bounds of intervals: the main ones, the others, those of categories."""

    def rank(name: str) -> tuple[bool, int, str]:
        return name.startswith(CATEGORY), MAIN.index(name) if name in MAIN else len(MAIN), name

    return sorted((name for name in values if not _is_bound(name, values)), key=rank)


def estimate_of(values: Mapping[str, float], name: str) -> str:
    """Return `0.75 (0.41 to 0.93)`: a metric and its 95% interval, if it has one."""
    low, high = (values.get(f"{name.removesuffix('/mean')}/{end}") for end in BOUNDS)
    interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    value = values[name]
    return (f"{value:,.0f}" if abs(value) >= LARGE else f"{value:.4g}") + interval


def result_rows(values: Mapping[str, float]) -> list[Sequence[str]]:
    """Return a row per metric: its name and its estimate."""
    return [(name, estimate_of(values, name)) for name in names_of(values)]


def _is_bound(name: str, values: Mapping[str, float]) -> bool:
    stem, _, end = name.rpartition("/")
    return end in BOUNDS and (stem in values or f"{stem}/mean" in values)
