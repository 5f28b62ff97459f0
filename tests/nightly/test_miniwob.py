"""MiniWoB++ in a real Chromium, unmodified; and, without a browser, pages as text and texts as deeds."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.adapters import browser_pool, miniwob_page
from opentinker.envs.adapters.library import Illegal
from opentinker.envs.adapters.miniwob import Diverged
from opentinker.envs.base import Action
from opentinker.envs.registry import check
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.child_process import Plain
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.core import Ending, Image, StopReason
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.support.listening import descendants, runs
from tests.support.playing import Table, opening, sit, step

browser = pytest.mark.skipif(
    shutil.which("chromedriver") is None or not any(map(shutil.which, browser_pool.BROWSERS)),
    reason="no Chromium on this machine: make browser (as root, on Debian), or install chromium and chromium-driver",
)

# --- pages and deeds, without a browser ------------------------------------------------------------------------------


def element(ref: int, tag: str, text: str = "", **more: Any) -> dict[str, Any]:
    plain = {"ref": ref, "parent": 1, "tag": tag, "text": text, "value": "", "id": "", "classes": "",
             "flags": [0, 0, 0, 1], "bg_color": [0, 0, 0, 0], "left": [10.0], "top": [50.0], "width": [40.0],
             "height": [20.0]}  # fmt: skip
    return plain | more


PAGE = [
    element(1, "body", flags=[1, 0, 0, 0]),
    element(2, "div", flags=[0, 0, 0, 0], id="wrap"),
    element(3, "button", "  Go\n on ", id="b", classes="big"),
    element(4, "input_text", value="abc", flags=[1, 0, 0, 1]),
    element(5, "input_checkbox", value="True"),
    element(6, "input_radio"),
    element(7, "div", bg_color=[1.0, 0.0, 0.5, 1.0]),
    element(-1, "t", "plain"),
    element(8, "circle", classes="SVG_CLASS"),
    element(9, "p", "x" * 600),
    element(10, "div"),
]


def test_a_page_is_told_by_what_can_be_read_or_used() -> None:
    assert miniwob_page.view(" Go. ", PAGE, False).splitlines() == [
        "Task: Go.",
        '[3] button "Go on" id=b class=big',
        '[4] input_text value="abc" focused',
        "[5] input_checkbox checked",
        "[6] input_radio not checked",
        "[7] div colour=#ff0080",
        '"plain"',
        "[8] circle",
        f'[9] p "{"x" * 500}..."',
    ]
    assert '[3] button "Go on" id=b class=big at (30, 60) 40x20' in miniwob_page.view("", PAGE, True)
    assert miniwob_page.view("", [element(9, "p", "x")] * 500, False).endswith("(100 more)")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("click(3)", "click", (3,)),
        ("click([3])", "click", (3,)),
        ("First click(4), no:\nAction: click (3)", "click", (3,)),
        ("click(4) then click(3).", "click", (3,)),
        ('type(4, "a (b), \\"c\\"")', "type", (4, 'a (b), "c"')),
        ("type(4, 'it\\'s')", "type", (4, "it's")),
        ('type("click(9)")', "type", ("click(9)",)),
        ('press("Enter")', "press", ("Enter",)),
        ("click_at(10, 20.5)", "click_at", (10, 20.5)),
        ("drag(1, 2, 3, 4)", "drag", (1, 2, 3, 4)),
        ('scroll(1, 2, "down")', "scroll", (1, 2, "down")),
    ],
)
def test_the_last_deed_that_is_said_counts(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    deed = miniwob_page.read(text, {3, 4}, (160, 210), True)
    assert (deed.name, deed.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is none"),
        ("I will click the button", "there is none"),
        ("click(9)", r"there is no element \[9\] now"),
        ('type(9, "a")', r"there is no element \[9\] now"),
        ("click(-1)", "there is no element"),
        ("click(3, 4)", "has not the arguments"),
        ('click("Ok")', "has not the arguments"),
        ("click(true)", "has not the arguments"),
        ("type(3)", "has not the arguments"),
        ("type(3, hello)", "cannot be read: texts stand in double quotes"),
        ('type(3, "hello)', "there is none|cannot be read"),
        ("click(" + "[" * 5000 + ")", "cannot be read"),
        ("click_at(200, 20)", "not on the page, which is 160 wide and 210 high"),
        ("drag(1, 2, 3, 211)", "not on the page"),
        ("click_at(1e999, 2)", "not on the page"),
        ("click_at(NaN, 2)", "not on the page"),
    ],
)
def test_what_is_no_deed_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(Illegal, match=why):
        miniwob_page.read(text, {3, 4}, (160, 210), True)


def test_positions_are_for_those_who_see_them() -> None:
    with pytest.raises(Illegal, match="click_at is not possible here"):
        miniwob_page.read("click_at(10, 20)", set(), (160, 210), False)
    assert "click_at" in miniwob_page.introduction(True) and "click_at" not in miniwob_page.introduction(False)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a browser and a driver that are none."""
    for name in ("chromium", "chromedriver"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "is needed"),
        ({"tasks": []}, "at least 1 item"),
        ({"tasks": ["click-test", "click-buttn"]}, "did you mean click-button"),
        ({"tasks": ["click-test"], "reward": "timed"}, "needs time_limit_s"),
        ({"tasks": ["click-test"], "path": "/bin/sh"}, "MiniWob knows: data_mode"),
    ],
)
def test_wrong_config_is_refused_before_play(programs: Path, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("miniwob", config)


def test_a_page_with_a_clock_is_not_copied(programs: Path) -> None:
    timed = {"tasks": ["click-test"], "time_limit_s": 10}
    check("miniwob", timed)
    with pytest.raises(SpecError, match="clock of a copied page"):
        check("miniwob", timed, forks=True)


def test_a_machine_without_chromium_says_what_to_install(programs: Path) -> None:
    check("miniwob", {"tasks": ["click-test"]})
    (programs / "chromedriver").unlink()
    with pytest.raises(SpecError, match="apt-get install --no-install-recommends chromium chromium-driver"):
        check("miniwob", {"tasks": ["click-test"]})


class Idle:
    """A browser that does nothing."""

    def __init__(self, runs: bool = True) -> None:
        self.closed = False
        self.instance = self.driver = self.service = self.process = self
        self.runs = runs

    def poll(self) -> int | None:
        return None if self.runs else 0

    def close(self) -> None:
        self.closed = True


async def test_browsers_wait_for_their_task_and_not_for_ever() -> None:
    shelf: Any = browser_pool.BrowserPool(2, 3600.0)
    first, second, third, dead = Idle(), Idle(), Idle(), Idle(runs=False)
    for task, browser in (("a", first), ("b", second), ("a", third)):
        shelf.put(task, browser)
    assert (first.closed, second.closed) == (True, False)
    assert shelf.take("c") is None and shelf.take("a") is third and shelf.take("a") is None
    shelf.put("d", dead)
    assert shelf.take("d") is None and shelf.take("b") is second
    brief: Any = browser_pool.BrowserPool(2, 0.01)
    brief.put("a", third)
    await until(lambda: third.closed)
    assert brief.take("a") is None


# --- real pages -------------------------------------------------------------------------------------------------------


def named(prompt: str, pattern: str) -> int:
    """The element of the last line that matches."""
    return int(re.findall(rf"^\[(\d+)\] {pattern}", prompt, re.MULTILINE)[-1])


def boxes(prompt: str) -> list[str]:
    """Check what the task says, of boxes that stand before their words."""
    asked = re.search(r"Select (.*) and click Submit", prompt)
    assert asked is not None
    words = asked[1].split(", ")
    found = re.findall(r'\[(\d+)\] input_checkbox[^\n]*\n"(.*)"', prompt)
    return [f"click({ref})" for ref, word in found if word in words]


def expert(task: str, prompt: str) -> list[str]:
    asked = re.findall(r'"(.*?)"', prompt.partition("Task: ")[2].splitlines()[0])
    match task:
        case "click-test":
            return [f"click({named(prompt, 'button')})"]
        case "click-button":
            button = named(prompt, f'button "{re.escape(asked[0])}"')
            return [f"click({button})"]
        case "enter-text":
            return [f'type({named(prompt, "input_text")}, "{asked[0]}")', f"click({named(prompt, 'button')})"]
        case "click-checkboxes":
            return [*boxes(prompt), f"click({named(prompt, 'button')})"]
    raise AssertionError(task)


TASKS = ["click-test", "click-button", "enter-text", "click-checkboxes"]


async def play(task: str, row: int, **config: Any) -> Table:
    table = await sit("miniwob", row, 7, tasks=[task], **config)
    step = await table.say(*expert(task, table.prompt))
    assert step.done and step.metrics["solved"] == 1.0, (table.prompt, table.steps)
    return table


@browser
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
async def test_tasks_are_solved_by_a_scripted_expert(task: str) -> None:
    """Three times in one browser: each episode has a fresh page, which its row and seed decide."""
    prompts = []
    for row in (0, 1, 0):
        table = await play(task, row)
        assert table.totals == {"": 1.0}
        prompts.append(table.prompt)
        await table.environment.close()
    assert prompts[0] == prompts[2]
    assert (prompts[0] != prompts[1]) == (task != "click-test")


@browser
@pytest.mark.slow
@pytest.mark.parametrize("task", ["enter-text", "click-checkboxes", "use-autocomplete", "login-user"])
async def test_a_fork_is_a_second_episode_in_the_same_state(task: str) -> None:
    table = await sit("miniwob", 3, 7, tasks=[task], max_steps=9)
    field = re.search(r"\[(\d+)\] input_(?:text|checkbox)", table.prompt)
    assert field is not None
    await table.say(f"click({field[1]})", 'type("ab")')
    first: Any = table.environment
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    assert second._view() == third._view() == first._view() and second._browser is not first._browser
    before = first._view()
    await second.step(Action(text='type("cd")', stop=StopReason.EOS, turn=2))
    await third.step(Action(text='press("Backspace")', stop=StopReason.EOS, turn=2))
    assert first._view() == before and (second._steps, first._steps) == (3, 2)
    if task != "click-checkboxes":
        assert len({first._view(), second._view(), third._view()}) == 3
    fourth = copy.deepcopy(second)
    assert fourth._view() == second._view()
    for one in (first, second, third, fourth):
        await one.close()


@browser
async def test_a_page_that_goes_another_way_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    table = await sit("miniwob", 3, 7, tasks=["enter-text"])
    environment: Any = table.environment
    await table.say('press("Tab")')
    monkeypatch.setattr(environment, "_seed", 8)
    with pytest.raises(Diverged, match="another page"):
        copy.deepcopy(environment)
    await environment.close()


@browser
@pytest.mark.slow
async def test_mistakes_cost_and_a_wrong_deed_ends_the_task() -> None:
    table = await sit("miniwob", tasks=["enter-text", "click-test"], positions=True, screenshot=True, max_steps=4)
    picture = (await table.environment.open(0, 0))[0].content[1]
    assert isinstance(picture, Image) and picture.data.startswith(b"\x89PNG")
    refused = await table.say("click(77)")
    assert refused.components == {"illegal": -0.1} and not refused.done
    assert "there is no element [77] now. Possible: click(REF)" in refused.messages[0].text
    assert "there is no key" in (await table.say('press("Any")')).messages[0].text
    field = re.search(r"input_text.* at \((\d+), (\d+)\)", table.prompt)
    assert field is not None
    await table.say(f"click_at({field[1]}, {field[2]})", 'type("abX")', 'press("Backspace")')
    assert 'value="ab" id=tt' in table.seen and "focused" in table.seen
    last = await table.say(f"click({named(table.prompt, 'button')})")
    assert last.done and last.reward == -1.0
    assert last.metrics == {"solved": 0.0, "illegal": 2.0, "truncated": 0.0, "task/enter-text": 1.0}
    await table.environment.close()


def names(pids: set[int]) -> set[str]:
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory where browsers have their files; in that of a test the names of their sockets would be too long."""
    with tempfile.TemporaryDirectory(prefix="ot-") as place:
        monkeypatch.setenv("TMPDIR", place)
        yield Path(place)


@browser
@pytest.mark.slow
@pytest.mark.parametrize("how", ["its process dies", "its host kills it", "the worker ends"])
async def test_no_browser_outlives_the_process_that_plays(how: str, short: Path) -> None:
    host = ChildPool(children=1, per_child=2, modules=False)
    sessions = Sessions("w", limit=99, resolver=Resolver(modules=False), host=host)
    opened = await sessions.open(opening("miniwob", deadline_s=300.0, tasks=["click-test"]))
    assert opened.failure is None, opened.error
    (child,) = host._children
    running = child._process
    assert isinstance(running, Plain)
    pids = {running._process.pid, *descendants(running._process.pid)}
    assert {"chromedriver", "chromium"} <= names(pids) and os.listdir(short)
    match how:
        case "its process dies":
            os.kill(running._process.pid, signal.SIGKILL)
        case "its host kills it":
            child.kill("the test says so")
        case _:
            await host.close()
    await until(lambda: not any(map(runs, pids)))
    await until(lambda: not os.listdir(short))
    if how == "its process dies":
        assert (await sessions.step(step(0, "click(1)"))).failure == Ending.ENV_ERROR
    await host.close()
