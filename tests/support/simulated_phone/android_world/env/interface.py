"""A phone of 216 x 480 pixels with a home screen, settings and contacts. Its state is one JSON object."""

import dataclasses
import os
from typing import Any

import numpy as np
from android_world.env.json_action import JSONAction
from android_world.env.representation_utils import BoundingBox, UIElement

WIDTH, HEIGHT, ROW = 216, 480, 40
COLOURS = {"Button": (60, 90, 220), "Switch": (120, 120, 120), "EditText": (230, 220, 120), "TextView": (240, 240, 240)}
ON = (30, 160, 60)


class AsyncEnv:
    pass


@dataclasses.dataclass(frozen=True)
class State:
    pixels: np.ndarray
    ui_elements: list[UIElement]


class SimulatedPhone(AsyncEnv):
    logical_screen_size = (WIDTH, HEIGHT)

    def __init__(self, console_port: int) -> None:
        self.console_port, self.interaction_cache = console_port, ""
        self.state: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        screens: list[str] = ["home"]
        self.state = {"Wi-Fi": True, "Bluetooth": False, "contacts": [], "screens": screens, "fields": {}, "focus": ""}

    # --- what tasks do ----------------------------------------------------------------------------------------------

    def begin(self, task: str) -> None:
        self.interaction_cache = ""
        self.clear()
        self._tell(f"begin {task}")

    def end(self, task: str) -> None:
        self._tell(f"end {task}")

    def _tell(self, event: str) -> None:
        if "SIMULATED_PHONE_EVENTS" in os.environ:
            with open(os.environ["SIMULATED_PHONE_EVENTS"], "a") as events:
                events.write(f"{event}\n")

    # --- what programs do -------------------------------------------------------------------------------------------

    def reset(self, go_home: bool = False) -> State:
        if go_home:
            self.state["screens"] = ["home"]
        return self.get_state()

    def hide_automation_ui(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_state(self, wait_to_stabilize: bool = False) -> State:
        elements = self._elements()
        pixels = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
        for one in elements:
            box = one.bbox_pixels
            assert box is not None and one.class_name is not None
            colour = ON if one.is_checked else COLOURS[one.class_name.split(".")[-1]]
            pixels[box.y_min : box.y_max, box.x_min : box.x_max] = colour
        return State(pixels, elements)

    def _elements(self) -> list[UIElement]:
        shown: list[tuple[str, dict[str, Any]]]
        match self.state["screens"][-1]:
            case "home":
                shown = [("Button", {"text": "Contacts"}), ("Button", {"text": "Settings"})]
            case "Settings":
                shown = [("Switch", {"content_description": name, "is_checkable": True, "is_checked": self.state[name]})
                         for name in ("Wi-Fi", "Bluetooth")]  # fmt: skip
            case "Contacts":
                people = [("TextView", {"text": f"{name} {number}"}) for name, number in self.state["contacts"]]
                shown = [("Button", {"text": "New contact"}), *people]
            case _:
                written, focus = self.state["fields"], self.state["focus"]
                shown = [
                    (
                        "EditText",
                        {
                            "hint_text": name,
                            "text": written.get(name),
                            "is_editable": True,
                            "is_focused": name == focus,
                        },
                    )
                    for name in ("Name", "Phone")
                ]
                shown.append(("Button", {"text": "Save"}))
        return [
            UIElement(class_name=f"android.widget.{kind}", **about,
                      bbox_pixels=BoundingBox(8, WIDTH - 8, 8 + at * ROW, 40 + at * ROW))
            for at, (kind, about) in enumerate(shown)
        ]  # fmt: skip

    def execute_action(self, action: JSONAction) -> None:
        screens = self.state["screens"]
        match action.action_type:
            case "answer":
                self.interaction_cache = action.text or ""
            case "click" | "double_tap" | "long_press":
                self._tap(action)
            case "input_text":
                self._tap(action)
                if self.state["focus"]:
                    old = "" if action.clear_text else self.state["fields"].get(self.state["focus"], "")
                    self.state["fields"][self.state["focus"]] = old + (action.text or "")
            case "navigate_home":
                del screens[1:]
            case "navigate_back":
                del screens[max(1, len(screens) - 1) :]
            case "open_app" if action.app_name in ("Contacts", "Settings"):
                self.state["screens"] = ["home", action.app_name]

    def _tap(self, action: JSONAction) -> None:
        elements = self._elements()
        if action.index is not None:
            hit = elements[action.index]
        elif action.x is None or action.y is None:
            return
        else:
            for hit in elements:
                box = hit.bbox_pixels
                assert box is not None
                if box.x_min <= action.x < box.x_max and box.y_min <= action.y < box.y_max:
                    break
            else:
                return
        self.state["focus"] = hit.hint_text or ""
        if hit.is_checkable:
            self.state[hit.content_description] = not self.state[hit.content_description]
        elif hit.text == "Save":
            fields = self.state["fields"]
            self.state["contacts"].append([fields.get("Name", ""), fields.get("Phone", "")])
            self.state["screens"].pop()
        elif hit.text in ("Contacts", "Settings", "New contact"):
            self.state["screens"].append(hit.text)
            self.state["fields"] = {}
