"""Actions of a policy on a phone: one JSON object a turn, in AndroidWorld's form, or only an element's number."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Literal, get_args

import msgspec

from opentinker.envs.adapters.library import Illegal, action_text, last_object
from opentinker.envs.phones.screen import Element, Screen

MAX_TEXT = 2000
TAIL = 8000
"""Characters at the end of a text in which an action is looked for: that takes time by their square."""
Type = Literal[
    "click", "double_tap", "long_press", "input_text", "keyboard_enter", "navigate_home", "navigate_back", "open_app",
    "scroll", "swipe", "wait", "answer", "status",
]  # fmt: skip
TYPES: tuple[str, ...] = get_args(Type)
AT = frozenset({"click", "double_tap", "long_press", "input_text", "scroll"})
"""Types that may name a place."""
LAST = frozenset({"answer", "status"})
"""Types that end the episode."""
FORMS: dict[str, tuple[str, str]] = {
    "click": ('{"action_type": "click", PLACE}', ""),
    "double_tap": ('{"action_type": "double_tap", PLACE}', ""),
    "long_press": ('{"action_type": "long_press", PLACE}', ""),
    "input_text": ('{"action_type": "input_text", "text": "...", PLACE}', 'with "clear_text": true it replaces'),
    "keyboard_enter": ('{"action_type": "keyboard_enter"}', ""),
    "scroll": ('{"action_type": "scroll", "direction": "down"}', "or up, left, right"),
    "swipe": ('{"action_type": "swipe", "direction": "left"}', "or right, up, down"),
    "navigate_back": ('{"action_type": "navigate_back"}', ""),
    "navigate_home": ('{"action_type": "navigate_home"}', ""),
    "open_app": ('{"action_type": "open_app", "app_name": "..."}', ""),
    "wait": ('{"action_type": "wait"}', ""),
    "answer": ('{"action_type": "answer", "text": "..."}', "the answer to a question; ends the task"),
    "status": ('{"action_type": "status", "goal_status": "complete"}', "or infeasible; ends the task"),
}
"""How each type is written, and a remark."""
_NUMBER = re.compile(r"\d{1,4}|\b(?:up|down)\b")


class PhoneAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One action. A place is an element's number, or a point in pixels of the screen that the policy sees."""

    action_type: Type
    index: int | None = None
    x: int | None = None
    y: int | None = None
    text: str | None = None
    direction: Literal["up", "down", "left", "right"] | None = None
    app_name: str | None = None
    goal_status: Literal["complete", "infeasible"] | None = None
    clear_text: bool | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def json(self) -> str:
        return json.dumps(self.fields(), ensure_ascii=False)


NEEDS: dict[str, str] = {"input_text": "text", "answer": "text", "scroll": "direction", "swipe": "direction",
                         "open_app": "app_name", "status": "goal_status"}  # fmt: skip
"""The field that a type cannot do without."""


def introduction(possible: Collection[str], place: str) -> str:
    """Return how actions are written. `place`: `index`, or `x and y`."""
    fields = '"index": NUMBER' if place == "index" else '"x": X, "y": Y'
    lines = []
    for name in TYPES:
        if name in possible:
            form, remark = FORMS[name]
            lines.append(form.replace("PLACE", fields) + (f"  {remark}" if remark else ""))
    return "\n".join(lines)


def read_number(text: str, screen: Screen) -> PhoneAction:
    """Return the tap on the element whose number is the first in a text, or the scroll. Raise Illegal."""
    found = _NUMBER.search(action_text(text))
    if found is None:
        raise Illegal("there is no number in what you say")
    if not found[0].isdecimal():
        return PhoneAction(action_type="scroll", direction="up" if found[0] == "up" else "down")
    action = PhoneAction(action_type="click", index=int(found[0]))
    _check_place(action, screen)
    return action


def read_json(text: str, screen: Screen, possible: Collection[str]) -> PhoneAction:
    """Return the last JSON object in a text as an action on this screen. Raise Illegal."""
    found = last_object(action_text(text)[-TAIL:])
    if found is None:
        raise Illegal("there is no JSON object in what you say")
    try:
        action = msgspec.convert(found, PhoneAction)
    except msgspec.ValidationError as error:
        raise Illegal(str(error)[:300]) from None
    name = action.action_type
    if name not in possible:
        raise Illegal(f"{name} is not possible here")
    needed = NEEDS.get(name)
    if needed and getattr(action, needed) is None:
        raise Illegal(f"{name} needs {needed}")
    if max(len(action.text or ""), len(action.app_name or "")) > MAX_TEXT:
        raise Illegal(f"that is too long: at most {MAX_TEXT:,} characters")
    _check_place(action, screen)
    return action


def _check_place(action: PhoneAction, screen: Screen) -> None:
    """Raise Illegal unless the action names a place where it must, and one of this screen."""
    point = (action.x, action.y)
    named = action.index is not None or point != (None, None)
    if named and action.action_type not in AT:
        raise Illegal(f"{action.action_type} has no place")
    if not named:
        if action.action_type in AT - {"input_text", "scroll"}:
            raise Illegal(f"{action.action_type} needs index, or x and y")
        return
    if action.index is not None:
        if point != (None, None):
            raise Illegal("give index, or x and y, not both")
        if screen.elements is None:
            raise Illegal("elements have no numbers here: give x and y")
        if not 0 <= action.index < len(screen.elements):
            raise Illegal(f"there is no element {action.index} now")
        return
    if action.x is None or action.y is None:
        raise Illegal("x and y belong together")
    if not (0 <= action.x < screen.width and 0 <= action.y < screen.height):
        raise Illegal(f"({action.x}, {action.y}) is not on the screen, which is {screen.width} x {screen.height}")


def place_of(action: PhoneAction, elements: list[Element]) -> tuple[float, float] | None:
    """Return the point that an action names: of an element, its centre."""
    if action.index is not None:
        left, top, right, bottom = elements[action.index].box
        return (left + right) / 2, (top + bottom) / 2
    return None if action.x is None or action.y is None else (float(action.x), float(action.y))
