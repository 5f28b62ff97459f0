"""Emulated phones. This package has no game for them. A checkout of the published package has one; it is found here if
the running script lies in that checkout, or if the checkout is on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from opentinker.unsupported import refused

GAME = "android_world_game"
HERE = Path(__file__).resolve().parent


def checkouts() -> Iterator[Path]:
    """Other folders `opentinker/environment/android_world`: below an entry of sys.path, or in the checkout that such an
    entry, e.g. the running script's folder, lies in."""
    for entry in sys.path:
        place = Path(entry or ".").resolve()
        roots = [place, *(parent.parent for parent in (place, *place.parents) if parent.name == "opentinker")]
        for root in roots:
            folder = root / "opentinker" / "environment" / "android_world"
            if folder != HERE and (folder / f"{GAME}.py").is_file():
                yield folder


__path__ += [str(folder) for folder in dict.fromkeys(checkouts())]


def __getattr__(name: str) -> object:
    if name != "AndroidWorldGame":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if len(__path__) == 1:
        return refused(
            name,
            "this package has no such game; run a script of a checkout that has one with `opentinker script SCRIPT`, "
            "or serve a game of your own with `opentinker env serve module:Class`",
        )
    from importlib import import_module

    game: object = getattr(import_module(f"{__name__}.{GAME}"), name)
    return game
