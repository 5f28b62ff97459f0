"""Emulated phones. A checkout of the published package has a game for them; it is found here if the running script lies
in that checkout, or if the checkout is on sys.path. Otherwise the game is that of phone_game.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

GAME, OURS = "android_world_game", "phone_game"
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
    from importlib import import_module

    game: object = getattr(import_module(f"{__name__}.{GAME if len(__path__) > 1 else OURS}"), name)
    return game
