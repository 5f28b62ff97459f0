"""Converts a MiniWoB++ page to text, and a policy's text to actions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from opentinker.envs.adapters.library import Illegal, action_text, shortened

LINES = 400
"""Maximum lines of a page that are shown; the rest is only counted."""
CHARACTERS = 500
"""Maximum characters shown of an element's text or value."""
FOCUSED, LEAF, CHECKED = 0, 3, "True"
NO_CLASS = "SVG_CLASS"
"""Class that MiniWoB++ reports for every drawing."""
BOXES = ("input_checkbox", "input_radio")
MEANT = ("input", "button", "textarea", "select", "option", "a", "svg", "circle", "rect", "polygon", "line", "canvas",
         "img", "label", "summary")  # fmt: skip
"""Tags that are shown even without text."""
HOW = (
    ("click(REF)", "on an element"),
    ('type(REF, "text")', "click on it, then type"),
    ('type("text")', "where the focus is"),
    ('press("Enter")', 'a key: "Backspace", "Tab", "ArrowDown", "C-a"...'),
)
HOW_AT = (
    ("click_at(X, Y)", ""),
    ("double_click_at(X, Y)", ""),
    ("drag(X, Y, X2, Y2)", ""),
    ('scroll(X, Y, "down")', 'or "up"'),
)
POSSIBLE = 'click(REF), type(REF, "text"), type("text"), press("KEY")'
POSSIBLE_AT = "click_at(X, Y), double_click_at(X, Y), drag(X, Y, X2, Y2), scroll(X, Y, DIRECTION)"
KINDS: dict[str, tuple[tuple[type, ...], ...]] = {
    "click": ((int,),),
    "type": ((int, str), (str,)),
    "press": ((str,),),
    "click_at": ((float, float),),
    "double_click_at": ((float, float),),
    "drag": ((float, float, float, float),),
    "scroll": ((float, float, str),),
}
"""Names, and the kinds of their arguments."""
_CALL = re.compile(rf"\b({'|'.join(sorted(KINDS, key=len, reverse=True))})[ ]?\((.*)\)")
_SINGLE = re.compile(r"'((?:[^'\\]|\\.)*)'(?=\s*(?:,|$))")


class PageAction(msgspec.Struct, frozen=True):
    """One action and its arguments."""

    name: str
    arguments: tuple[Any, ...]


def introduction(positions: bool) -> str:
    how = "\n".join(f"{form}{f'  {about}' if about else ''}" for form, about in (*HOW, *(HOW_AT if positions else ())))
    return f"Do the task on the web page. Each turn, say one action:\n{how}\nThe last one that you say counts."


def view(utterance: str, elements: Sequence[dict[str, Any]], positions: bool) -> str:
    """Return the task and the visible elements of the page: `[4] button "Ok"`."""
    lines = [_line(element, positions) for element in elements if _matters(element)]
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"({len(lines) - LINES} more)"]
    return "\n".join([f"Task: {utterance.strip()}", *lines])


def _matters(element: dict[str, Any]) -> bool:
    """Return whether an element has text, can be used, or is a leaf with a name or colour."""
    if element["text"].strip() or element["value"] or element["tag"].split("_")[0] in MEANT:
        return True
    return bool(element["flags"][LEAF] and (element["classes"] or element["id"] or _colour(element)))


def _colour(element: dict[str, Any]) -> str:
    """Return the background color, empty if the element has none."""
    red, green, blue, alpha = (float(part) for part in element["bg_color"])
    if alpha == 0.0 or min(red, green, blue) == 1.0:
        return ""
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def _line(element: dict[str, Any], positions: bool) -> str:
    if element["ref"] < 0:  # a text between elements
        return f'"{_short(element["text"])}"' + (_place(element) if positions else "")
    parts = [f"[{element['ref']}] {element['tag']}"]
    if text := element["text"].strip():
        parts.append(f'"{_short(text)}"')
    if element["tag"] in BOXES:
        parts.append("checked" if element["value"] == CHECKED else "not checked")
    elif element["value"]:
        parts.append(f'value="{_short(element["value"])}"')
    if element["id"]:
        parts.append(f"id={element['id']}")
    if element["classes"] and element["classes"] != NO_CLASS:
        parts.append(f"class={element['classes']}")
    if not text and element["flags"][LEAF] and (colour := _colour(element)):
        parts.append(f"colour={colour}")
    if element["flags"][FOCUSED] and element["tag"] != "body":
        parts.append("focused")
    return " ".join(parts) + (_place(element) if positions else "")


def _place(element: dict[str, Any]) -> str:
    """Return centre and size."""
    left, top, width, height = (float(element[name][0]) for name in ("left", "top", "width", "height"))
    return f" at ({left + width / 2:.0f}, {top + height / 2:.0f}) {width:.0f}x{height:.0f}"


def _short(text: str) -> str:
    return shortened(text, CHARACTERS)


def read(text: str, refs: set[int], size: tuple[float, float], positions: bool) -> PageAction:
    """Return the last action in a text. Raise Illegal.

    `refs`: the existing elements; `size` of the page, if positions may be named.
    """
    found = None
    for line in action_text(text).splitlines():
        found = _last_call(line) or found
    if found is None:
        raise Illegal("there is none in what you say")
    name, given = found
    if name not in ("click", "type", "press") and not positions:
        raise Illegal(f"{name} is not possible here")
    arguments = _arguments(given)
    if not any(_fits(arguments, kinds) for kinds in KINDS[name]):
        raise Illegal(f"{name}({_short(given)}) has not the arguments that it takes")
    if name in ("click", "type") and isinstance(arguments[0], int) and arguments[0] not in refs:
        raise Illegal(f"there is no element [{arguments[0]}] now")
    points = [float(value) for value in arguments if isinstance(value, int | float)]
    if name not in ("click", "type", "press") and not all(
        0 <= point < limit for point, limit in zip(points, size * 2, strict=False)
    ):
        raise Illegal(f"that is not on the page, which is {size[0]:.0f} wide and {size[1]:.0f} high")
    return PageAction(name, tuple(arguments))


def _last_call(line: str) -> tuple[str, str] | None:
    """Return the last call in a line, ignoring text in quotes."""
    found, start = None, 0
    while match := _CALL.search(line, start):
        end = _find_closing(line, match.start(2))
        if end is None:
            return found or (match[1], match[2])
        found, start = (match[1], line[match.start(2) : end]), end
    return found


def _find_closing(line: str, start: int) -> int | None:
    """Return the position of the bracket that closes the one at `start`, ignoring quotes."""
    quote = ""
    for index in range(start, len(line)):
        sign = line[index]
        if quote:
            if sign == quote and line[index - 1] != "\\":
                quote = ""
        elif sign in "\"'":
            quote = sign
        elif sign == ")":
            return index
    return None


def _arguments(given: str) -> list[Any]:
    """Parse JSON values; single quotes and a bare `[4]` are accepted. Raise Illegal."""
    text = _SINGLE.sub(lambda match: json.dumps(match[1].replace("\\'", "'")), given.strip())
    text = re.sub(r"^\[(\d+)\]", r"\1", text)
    try:
        values = json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        raise Illegal(f"({_short(given)}) cannot be read: texts stand in double quotes") from None
    return list(values)


def _fits(values: list[Any], kinds: tuple[type, ...]) -> bool:
    return len(values) == len(kinds) and all(
        type(value) is kind or (kind is float and type(value) is int) for value, kind in zip(values, kinds, strict=True)
    )
