"""The state of a phone as AndroidWorld tells it, as the screen that a policy sees, and back: actions of the policy as
those of the phone."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from opentinker.envs.adapters.library import Illegal
from opentinker.envs.base import BadReply
from opentinker.envs.phones.actions import PhoneAction, place_of
from opentinker.envs.phones.screen import Element, Screen


class _Box(msgspec.Struct):
    x_min: float
    y_min: float
    x_max: float
    y_max: float


class _UiElement(msgspec.Struct):
    """The used part of an element of the screen, as AndroidWorld reports it."""

    text: str | None = None
    content_description: str | None = None
    class_name: str | None = None
    hint_text: str | None = None
    bbox_pixels: _Box | None = None
    is_checked: bool | None = None
    is_checkable: bool | None = None
    is_editable: bool | None = None
    is_focused: bool | None = None
    is_visible: bool | None = None


class PhoneState(msgspec.Struct, frozen=True):
    """The answer to `GET /state` (android_server.py)."""

    width: int
    height: int
    ui_elements: list[_UiElement]
    picture: str = ""
    """PNG in base64."""


class ScreenView(msgspec.Struct, frozen=True, kw_only=True):
    """A screen as the policy sees it, and how to get back to the phone's own."""

    screen: Screen
    scale: float
    """Pixels of the phone per pixel of the screen."""
    numbers: list[int]
    """The phone's own number of each element."""

    def fields(self, action: PhoneAction) -> dict[str, Any]:
        """Return an action as the phone takes it: places are points on its screen, because the numbers of elements may
        change in the meantime. Raise Illegal."""
        fields = {name: value for name, value in action.fields().items() if name not in ("index", "x", "y")}
        if action.action_type == "scroll":
            if action.x is not None:
                raise Illegal("scroll has a direction, and an index or no place")
            if action.index is not None:
                fields["index"] = self.numbers[action.index]
        elif (place := place_of(action, self.screen.elements or [])) is not None:
            fields["x"], fields["y"] = (round(side * self.scale) for side in place)
        return fields


def seen_of(state: PhoneState, max_side: int) -> ScreenView:
    """`max_side`: the longest side of the screen that positions refer to. Raise BadReply."""
    if state.width <= 0 or state.height <= 0:
        raise BadReply(f"a phone's screen cannot be {state.width} x {state.height} pixels")
    try:
        picture = base64.b64decode(state.picture, validate=True)
    except binascii.Error as error:
        raise BadReply(f"a phone's picture must be base64: {error}") from None
    factor = -(-max(state.width, state.height) // max_side)
    told = [(number, one.bbox_pixels, one) for number, one in enumerate(state.ui_elements)]
    kept = [(number, _element(one, box, factor)) for number, box, one in told
            if box is not None and _is_on(box, one, state)]  # fmt: skip
    elements = [element for _, element in kept]
    screen = Screen(width=state.width // factor, height=state.height // factor, picture=picture, elements=elements)
    return ScreenView(screen=screen, scale=float(factor), numbers=[number for number, _ in kept])


def _is_on(box: _Box, one: _UiElement, state: PhoneState) -> bool:
    """Return whether an element is on the screen."""
    inside = 0 <= (box.x_min + box.x_max) / 2 < state.width and 0 <= (box.y_min + box.y_max) / 2 < state.height
    return one.is_visible is not False and inside and box.x_min < box.x_max and box.y_min < box.y_max


def _element(one: _UiElement, box: _Box, factor: int) -> Element:
    left, top, right, bottom = (round(side / factor) for side in (box.x_min, box.y_min, box.x_max, box.y_max))
    named = one.content_description or one.hint_text or ""
    return Element(
        box=(left, top, right, bottom),
        kind=(one.class_name or "View").rpartition(".")[2],
        text=named if one.is_editable else one.text or named,
        value=(one.text or "") if one.is_editable else "",
        checked=bool(one.is_checked) if one.is_checkable else None,
        focused=bool(one.is_focused) and bool(one.is_editable),
    )
