"""Checkpoints and uploads that a stored sweep's jobs name: of sweeps that were stored without a list of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from opentinker.shared.spec.start import SAVED

NAMING = re.compile(
    r"environment\.name|start\.from|policies\.[^.]+\.start\.from|seats\..+\.frozen|validation\.against\.[0-9]+\.frozen"
)
"""Paths of the settings that name one."""
EXACT = re.compile(rf"{SAVED.pattern}|upload:[a-z0-9][a-z0-9_-]{{0,62}}@[1-9][0-9]{{0,8}}\+[0-9a-f]{{20}}")
"""A name as a sweep keeps it, with the step or version that its submission found."""


def uses_of(table: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Return what the settings of its jobs name: the values of its parameters, and in `base` what these leave."""
    varied = table["parameters"]
    found = [name for path, name in _leaves("", base) if not any(_is_below(path, above) for above in varied)]
    for path, parameter in varied.items():
        found += [name for value in parameter["values"] or () for _, name in _leaves(path, value)]
    return sorted(set(found))


def _is_below(path: str, above: str) -> bool:
    return f"{path}.".startswith(f"{above}.")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each setting that names one, at `path` and below it."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{path}.{name}" if path else str(name), part)
    elif isinstance(value, str) and NAMING.fullmatch(path) and EXACT.fullmatch(value):
        yield path, value
