"""An action, as programs hand it to the phone."""

import dataclasses

TYPES = ("click", "double_tap", "scroll", "swipe", "input_text", "navigate_home", "navigate_back", "keyboard_enter",
         "open_app", "status", "wait", "long_press", "answer")  # fmt: skip


@dataclasses.dataclass
class JSONAction:
    action_type: str
    index: int | None = None
    x: int | None = None
    y: int | None = None
    text: str | None = None
    direction: str | None = None
    goal_status: str | None = None
    app_name: str | None = None
    clear_text: bool | None = None

    def __post_init__(self) -> None:
        if self.action_type not in TYPES:
            raise ValueError(f"Invalid action type: {self.action_type}")
