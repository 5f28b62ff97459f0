"""What is on the screen."""

import dataclasses


@dataclasses.dataclass
class BoundingBox:
    x_min: int
    x_max: int
    y_min: int
    y_max: int


@dataclasses.dataclass
class UIElement:
    text: str | None = None
    content_description: str | None = None
    class_name: str | None = None
    bbox_pixels: BoundingBox | None = None
    hint_text: str | None = None
    is_checked: bool = False
    is_checkable: bool = False
    is_clickable: bool = True
    is_editable: bool = False
    is_focused: bool = False
    is_visible: bool = True
