"""A phone's screen: its elements, and a picture for models that take images."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from opentinker.envs.adapters.library import shortened
from opentinker.shared.types.core import Image, Message, Text

LINES = 200
"""Maximum elements that are told; the rest is only counted."""
CHARACTERS = 200
"""Maximum characters told of an element's text or value."""


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """Something on the screen that can be read or used."""

    box: tuple[int, int, int, int]
    """Left, top, right and bottom in pixels of the screen."""
    kind: str
    """`button`, `switch`, `field`, `text`, or a class of Android."""
    text: str = ""
    value: str = ""
    checked: bool | None = None
    focused: bool = False


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    width: int
    height: int
    elements: list[Element] | None = None
    """None: the phone tells none."""
    picture: bytes = b""
    """PNG or JPEG, if it was asked for."""


def tell(elements: Sequence[Element], positions: bool) -> str:
    """Return one line per element: `[3] switch "Wi-Fi" on`."""
    lines = [_line(number, element, positions) for number, element in enumerate(elements[:LINES])]
    if len(elements) > LINES:
        lines.append(f"({len(elements) - LINES} more)")
    return "\n".join(lines)


def _line(number: int, element: Element, positions: bool) -> str:
    parts = [f"[{number}] {element.kind}"]
    if element.text:
        parts.append(f'"{shortened(element.text, CHARACTERS)}"')
    if element.value:
        parts.append(f'value="{shortened(element.value, CHARACTERS)}"')
    if element.checked is not None:
        parts.append("on" if element.checked else "off")
    if element.focused:
        parts.append("focused")
    if positions:
        left, top, right, bottom = element.box
        parts.append(f"at ({(left + right) // 2}, {(top + bottom) // 2})")
    return " ".join(parts)


def message(before: str, screen: Screen, *, elements: bool, positions: bool) -> Message:
    """Return the user message that shows a screen, after some words."""
    told = tell(screen.elements, positions) if elements and screen.elements is not None else ""
    text = "\n".join(filter(None, [before, told]))
    if not screen.picture:
        return Message(role="user", content=text)
    return Message(role="user", content=[Text(text), Image(data=screen.picture)])
