"""Names of the published client without a counterpart here: they can be imported; a call raises an error that names
the alternative."""

from __future__ import annotations

from typing import Any


class Unsupported:
    instead = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {self.instead}")


def refused(name: str, instead: str) -> Any:
    """A class, so that it may be called, subclassed, or stand in a type hint."""
    return type(name, (Unsupported,), {"instead": instead, "__doc__": f"Refused: {instead}"})
