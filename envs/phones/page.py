"""A phone in a web page, in a headless Chromium of the child process: five apps, no emulator.

The state of an episode is one JSON object, kept here. Every call loads it into the browser, plays, and reads it back:

    step: state --load--> page --tap, type--> look --save--> state

So all episodes of a process share one browser and one page, a fork is a copy of the object, and a browser that crashes
is replaced without a loss.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from opentinker.envs.adapters.library import Illegal, check_known
from opentinker.envs.base import ELSEWHERE
from opentinker.envs.phones.actions import PhoneAction, place_of, read_number
from opentinker.envs.phones.chromium import Chromium, SharedBrowser, program
from opentinker.envs.phones.page_data import phone_data, phone_state
from opentinker.envs.phones.page_tasks import TAPS, TASKS, PhoneTask, make_task
from opentinker.envs.phones.phone import Phone, PhoneConfig
from opentinker.envs.phones.screen import Element, Screen

PAGE = Path(__file__).with_name("phone.html")
IDLE_S = 60.0


class PhonePage(Phone):
    """Tasks with contacts, messages, settings, alarms and notes. Reward: 1 if the phone's data is exactly what the task
    asks for, otherwise 0."""

    class Config(PhoneConfig):
        tasks: Annotated[list[str], Field(min_length=1, max_length=100)] = list(TASKS)  # noqa: RUF012 - pydantic copies defaults
        """Names of tasks. The row of an episode selects one; its row and seed decide the rest."""
        actions: Literal["json", "number"] = "json"
        """`number`: the first number in the policy's text is the element that it taps, and `down` or `up` scrolls; the
        episode ends when the task is done."""
        stop_when_done: bool = False
        """End the episode when the task is done, without waiting for the policy to say so."""
        shuffle: bool = True
        """Draw the order of the apps, too."""
        width: Annotated[int, Field(ge=200, le=2000)] = 360
        height: Annotated[int, Field(ge=200, le=4000)] = 640
        """Size of the screen in pixels of the page."""
        scale: Annotated[float, Field(ge=0.05, le=4.0)] = 1.0
        """Size of a screenshot's pixel: 0.5 halves both sides of the picture. Actions name points of the picture."""

        @model_validator(mode="after")
        def _can_be_played(self, info: ValidationInfo) -> Self:
            for task in self.tasks:
                check_known("task as tasks", task, TASKS)
            if self.actions == "number":
                if typed := sorted(set(self.tasks) - TAPS):
                    raise ValueError(f"actions = 'number' can only tap, and these tasks need more: {', '.join(typed)}")
                if not self.shows_elements and self.instruction is None:
                    raise ValueError("actions = 'number' with observation = 'screenshot' shows no numbers: say them in "
                                     "instruction")  # fmt: skip
            if not (info.context or {}).get(ELSEWHERE):
                program()
            return self

    config: Config
    blocking = True
    can_fork = True
    cost = 4.0
    possible = frozenset({"click", "input_text", "keyboard_enter", "scroll", "navigate_back", "navigate_home",
                          "open_app", "answer", "status"})  # fmt: skip
    browser: ClassVar = SharedBrowser(PAGE, IDLE_S)

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        """See that the browser starts and shows the page."""
        cls.browser.use(lambda browser: browser.evaluate("1"))

    async def _begin(self, row: int, seed: int) -> str:
        self._name = self.config.tasks[row % len(self.config.tasks)]
        random = Random(f"phone/{seed}/{row}")
        data = phone_data(random, self.config.shuffle)
        self._task: PhoneTask = make_task(self._name, random, data)
        self._state = phone_state(data)
        self._said: str | None = None
        self._way = 0
        """Number of the expert's next action."""
        return self._task.goal

    async def _look(self) -> Screen:
        return self.browser.use(self._show)

    async def _act(self, action: PhoneAction) -> None:
        if action.action_type == "open_app" and action.app_name not in self._state["data"]["apps"]:
            raise Illegal(f"there is no app {action.app_name!r:.60}")
        if action.action_type in ("answer", "status"):
            self._said = action.text
        else:
            self.browser.use(lambda browser: self._play(browser, action))

    async def _is_over(self) -> bool:
        stops = self.config.stop_when_done or self.config.actions == "number"
        return stops and self._task.answer is None and self._task.is_done(self._state, None)

    async def _score(self) -> float:
        return float(self._task.is_done(self._state, self._said))

    def _task_name(self) -> str:
        return self._name if len(self.config.tasks) > 1 else ""

    def _read(self, text: str) -> PhoneAction:
        return read_number(text, self._screen) if self.config.actions == "number" else super()._read(text)

    def _how(self) -> str:
        if self.config.actions == "number":
            return "Each turn, say the number of the element to tap, or down or up to scroll."
        return super()._how()

    # --- the browser ------------------------------------------------------------------------------------------------

    def _load(self, browser: Chromium) -> None:
        config = self.config
        size = (config.width, config.height, config.scale)
        if browser.metrics != size:
            browser.call("Emulation.setDeviceMetricsOverride", width=config.width, height=config.height,
                         deviceScaleFactor=config.scale, mobile=False)  # fmt: skip
            browser.metrics = size
        browser.evaluate(f"phone.load({json.dumps(self._state)})")

    def _show(self, browser: Chromium) -> Screen:
        self._load(browser)
        scale = self.config.scale
        elements = [
            Element(**{**one, "box": tuple(round(side * scale) for side in one["box"])})
            for one in browser.evaluate("phone.look()")
        ]
        picture = b""
        if self.config.shows_picture:
            picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        width, height = round(self.config.width * scale), round(self.config.height * scale)
        return Screen(width=width, height=height, elements=elements, picture=picture)

    def _play(self, browser: Chromium, action: PhoneAction) -> None:
        self._load(browser)
        place = place_of(action, self._screen.elements or [])
        if place is not None:
            x, y = (side / self.config.scale for side in place)
        match action.action_type:
            case "click":
                _click(browser, x, y)
            case "input_text":
                if place is not None:
                    _click(browser, x, y)
                if action.clear_text:
                    browser.evaluate("phone.clear()")
                browser.call("Input.insertText", text=action.text)
            case "keyboard_enter":
                for kind in ("keyDown", "keyUp"):
                    browser.call(
                        "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13
                    )
            case "scroll":
                browser.evaluate(f"phone.scroll({json.dumps(action.direction)})")
            case "open_app":
                browser.evaluate(f"phone.tap('open', {json.dumps(action.app_name)})")
            case "navigate_back":
                browser.evaluate("phone.tap('back')")
            case _:
                browser.evaluate("phone.tap('home')")
        self._state = browser.evaluate("phone.save()")

    # --- the expert ---------------------------------------------------------------------------------------------------

    def gold(self) -> str:
        """Return the next action of the task's way, or a scroll to its element."""
        if self._way == len(self._task.way):
            return PhoneAction(action_type="status", goal_status="complete").json()
        verb, name, *rest = self._task.way[self._way]
        if verb == "answer":
            action = PhoneAction(action_type="answer", text=name)
        else:
            index = self._find(name, verb)
            if index is None:
                number = self.config.actions == "number"
                return "down" if number else PhoneAction(action_type="scroll", direction="down").json()
            action = PhoneAction(action_type="click", index=index)
            if verb == "type":
                action = PhoneAction(action_type="input_text", index=index, text=rest[0], clear_text=True)
        self._way += 1
        return str(action.index) if self.config.actions == "number" else action.json()

    def _find(self, text: str, verb: str) -> int | None:
        kinds = ("field",) if verb == "type" else ("button", "switch")
        for number, one in enumerate(self._screen.elements or []):
            if one.kind in kinds and (one.text == text or one.text.startswith(f"{text}, ")):
                return number
        return None


def _click(browser: Chromium, x: float, y: float) -> None:
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
