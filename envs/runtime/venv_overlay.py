"""The packages that play an environment, mounted into the virtual environment of an upload: ours and its dependencies.

They are mounted read-only, not installed. A package that the lock contains is not mounted: its version must then be one
that we support.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import Distribution, distribution

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from opentinker.shared.data.uploads import Pin

NEEDED = ("msgspec>=0.20", "numpy>=1.26", "pydantic>=2.11,<3")
"""Packages that a child process imports; their dependencies are added."""
OWN, LENT = "/runtime/src", "/runtime/lent"
PATH = (OWN, LENT)
"""Directories for PYTHONPATH."""


class RuntimePackages:
    def __init__(self) -> None:
        self._asked: list[tuple[str, Requirement]] = []
        """Requirements, with the package that has them; empty: our own modules."""
        self._held: dict[str, Distribution] = {}
        waiting = [("", Requirement(text)) for text in NEEDED]
        for who, requirement in waiting:
            name = canonicalize_name(requirement.name)
            self._asked.append((who, requirement))
            if name not in self._held:
                self._held[name] = distribution(name)
                needed = map(Requirement, self._held[name].requires or [])
                waiting += [(name, found) for found in needed if _applies(found.marker)]

    def binds(self, pins: list[Pin]) -> dict[str, str]:
        """Return mount point -> source, without the packages in the lock."""
        locked = installed(pins)
        lent = [held for name, held in self._held.items() if name not in locked]
        return own_package() | {f"{LENT}/{top}": str(held.locate_file(top)) for held in lent for top in _tops(held)}

    def conflicts(self, pins: list[Pin]) -> list[str]:
        """Return the packages that the lock pins to a version that ours, or a mounted package, cannot work with."""
        locked = installed(pins)
        asked = [(canonicalize_name(asked.name), asked) for who, asked in self._asked if who not in locked]
        return [
            f"{name}=={locked[name]}, and what plays environments here needs {asked}"
            for name, asked in asked
            if name in locked and not asked.specifier.contains(locked[name], prereleases=True)
        ]


def package_dir() -> str:
    return str(import_module("opentinker").__path__[0])


def own_package() -> dict[str, str]:
    """Return `opentinker` as it is imported here; in a checkout parts of it are links to folders outside the
    package."""
    package = package_dir()
    place = f"{OWN}/opentinker"
    binds = {place: package}
    for entry in os.scandir(package):
        if entry.is_symlink():
            target = os.path.normpath(os.path.join(place, os.readlink(entry.path)))
            binds[target] = os.path.realpath(entry.path)
    return binds


def installed(pins: list[Pin]) -> dict[str, str]:
    """Return name -> version of those that apply to this interpreter."""
    return {pin.name: pin.version for pin in pins if _applies(Marker(pin.marker) if pin.marker else None)}


def _applies(marker: Marker | None) -> bool:
    return marker is None or marker.evaluate({"extra": ""})


def _tops(held: Distribution) -> set[str]:
    return {file.parts[0] for file in held.files or [] if file.parts[0] not in ("..", "__pycache__", "bin")}
