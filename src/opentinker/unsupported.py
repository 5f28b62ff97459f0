"""Names of the published interface that mean nothing here: they can be imported, and say what to do when called."""

from __future__ import annotations

from typing import Any


class Unsupported:
    instead = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {self.instead}")


def refused(name: str, instead: str) -> Any:
    """A class, so that it may be called, subclassed, or stand in a type hint."""
    return type(name, (Unsupported,), {"instead": instead, "__doc__": f"Refused: {instead}"})
