"""Phones: actions as JSON, screens as text, contexts, leases; and tasks of the page without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from opentinker.envs.adapters.library import Illegal
from opentinker.envs.base import BadReply
from opentinker.envs.phones import leases
from opentinker.envs.phones.actions import FORMS, TYPES, introduction, place_of, read_json, read_number
from opentinker.envs.phones.chromium import PROGRAMS, program
from opentinker.envs.phones.page_data import phone_data, phone_state
from opentinker.envs.phones.page_tasks import TAPS, TASKS, make_task
from opentinker.envs.phones.phone import Phone, PhoneConfig
from opentinker.envs.phones.pixels import PixelReader
from opentinker.envs.phones.screen import Element, Screen, tell
from opentinker.envs.registry import check
from opentinker.shared.types.errors import SpecError
from tests.support.playing import Table

ELEMENTS = [
    Element(box=(0, 0, 100, 40), kind="button", text="Go\n on"),
    Element(box=(0, 40, 100, 80), kind="switch", text="Wi-Fi", checked=True),
    Element(box=(0, 80, 100, 120), kind="field", text="Name", value="Ada", focused=True),
    Element(box=(0, 120, 100, 160), kind="text", text="x" * 300),
]
SCREEN = Screen(width=100, height=200, elements=ELEMENTS)


def test_a_screen_is_told_by_its_elements() -> None:
    assert tell(ELEMENTS, False).splitlines() == [
        '[0] button "Go on"',
        '[1] switch "Wi-Fi" on',
        '[2] field "Name" value="Ada" focused',
        f'[3] text "{"x" * 200}..."',
    ]
    assert tell(ELEMENTS[:1], True) == '[0] button "Go on" at (50, 20)'
    assert tell(ELEMENTS * 100, False).endswith("(200 more)")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"action_type": "click", "index": 1}', {"action_type": "click", "index": 1}),
        ('Reason: {"x"} no\nAction: {"action_type": "click", "x": 5, "y": 6}.',
         {"action_type": "click", "x": 5, "y": 6}),
        ('{"action_type": "wait"} or rather {"action_type": "navigate_back"}', {"action_type": "navigate_back"}),
        ('{"action_type": "input_text", "text": "a } \\" b", "index": 2, "clear_text": true}',
         {"action_type": "input_text", "text": 'a } " b', "index": 2, "clear_text": True}),
        ('{"action_type": "scroll", "direction": "down"}', {"action_type": "scroll", "direction": "down"}),
        ('{"action_type": "input_text", "text": "where the focus is"}',
         {"action_type": "input_text", "text": "where the focus is"}),
        ('{"action_type": "status", "goal_status": "infeasible"}',
         {"action_type": "status", "goal_status": "infeasible"}),
    ],
)  # fmt: skip
def test_the_last_json_object_counts(text: str, fields: dict[str, Any]) -> None:
    assert read_json(text, SCREEN, TYPES).fields() == fields


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object"),
        ("click 3", "no JSON object"),
        ('{"action_type": "click", "index": 1', "no JSON object"),
        ("{" * 5000, "no JSON object"),
        ('{"a":' * 3000, "no JSON object"),
        ('{"action_type": "fly"}', "Invalid enum value 'fly'"),
        ('{"action_type": "click", "index": 1, "colour": 2}', "unknown field `colour`"),
        ('{"action_type": "click", "index": "1"}', "Expected `int"),
        ('{"action_type": "click", "index": true}', "Expected `int"),
        ('{"action_type": "click", "index": 4}', "there is no element 4 now"),
        ('{"action_type": "click", "index": -1}', "there is no element -1 now"),
        ('{"action_type": "click"}', "click needs index, or x and y"),
        ('{"action_type": "click", "index": 1, "x": 1, "y": 1}', "not both"),
        ('{"action_type": "click", "x": 1}', "belong together"),
        ('{"action_type": "click", "x": 100, "y": 1}', r"\(100, 1\) is not on the screen, which is 100 x 200"),
        ('{"action_type": "wait", "index": 1}', "wait has no place"),
        ('{"action_type": "input_text", "index": 2}', "input_text needs text"),
        ('{"action_type": "scroll"}', "scroll needs direction"),
        ('{"action_type": "status"}', "status needs goal_status"),
        ('{"action_type": "long_press", "index": 1}', "long_press is not possible here"),
        (json.dumps({"action_type": "answer", "text": "x" * 2001}), "too long"),
    ],
)
def test_what_is_no_action_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(Illegal, match=why):
        read_json(text, SCREEN, set(TYPES) - {"long_press"})


def test_elements_without_numbers_are_named_by_points() -> None:
    seen = Screen(width=100, height=200)
    with pytest.raises(Illegal, match="give x and y"):
        read_json('{"action_type": "click", "index": 1}', seen, TYPES)
    assert place_of(read_json('{"action_type": "click", "x": 7, "y": 9}', seen, TYPES), []) == (7.0, 9.0)
    assert place_of(read_json('{"action_type": "click", "index": 1}', SCREEN, TYPES), ELEMENTS) == (50.0, 60.0)


def test_a_number_is_a_tap() -> None:
    assert read_number("I tap 2, not 3", SCREEN).fields() == {"action_type": "click", "index": 2}
    assert read_number("down", SCREEN).fields() == {"action_type": "scroll", "direction": "down"}
    for text, why in (
        ("", "no number"),
        ("downtown", "no number"),
        ("7", "no element 7"),
        ("12345", "no element 1234"),
    ):
        with pytest.raises(Illegal, match=why):
            read_number(text, SCREEN)


def test_every_possible_action_is_told_and_can_be_read_as_it_is_told() -> None:
    told = introduction(TYPES, "index").splitlines()
    assert len(told) == len(TYPES) == len(FORMS)
    for line in told:
        read_json(line.replace("NUMBER", "1"), SCREEN, TYPES)
    assert '"x": X, "y": Y' in introduction(TYPES, "x and y")
    assert "open_app" not in introduction({"click"}, "index")


# --- an episode without a phone ---------------------------------------------------------------------------------------


class Glass(Phone):
    """Nothing happens on it."""

    config: PhoneConfig
    Config = PhoneConfig
    possible = frozenset({"click", "status"})

    async def _begin(self, row: int, seed: int) -> str:
        return "Break it."

    async def _look(self) -> Screen:
        return SCREEN

    async def _act(self, action: Any) -> None:
        pass

    async def _score(self) -> float:
        return 0.5

    def _task_name(self) -> str:
        return "glass"


async def sit_before(**config: Any) -> Table:
    glass = Glass(PhoneConfig(**config))
    return Table(glass, await glass.open(0, 0))


TAP, DONE = '{"action_type": "click", "index": 1}', '{"action_type": "status", "goal_status": "complete"}'


async def test_the_check_gives_the_reward_and_counts_as_solved_only_if_it_is_whole() -> None:
    table = await sit_before()
    assert table.prompt.splitlines()[0] == "Do the task on the phone. Each turn, say one action as JSON:"
    assert table.prompt.splitlines()[3:5] == ["Task: Break it.", '[0] button "Go on"']
    await table.say(TAP)
    assert table.seen == tell(ELEMENTS, False)
    last = await table.say(DONE)
    assert (last.reward, last.done) == (0.5, True)
    assert last.metrics == {"solved": 0.0, "actions": 2.0, "illegal": 0.0, "task/glass": 1.0}


async def test_a_mistake_costs_and_too_many_end_the_episode() -> None:
    table = await sit_before(penalty=0.25, max_illegal=2)
    first = await table.say("what?")
    assert (first.reward, first.done, first.components) == (-0.25, False, {"illegal": -0.25})
    assert table.seen == "That is no action: there is no JSON object in what you say."
    assert (await table.say('{"action_type": "wait"}')).done


async def test_a_fresh_context_tells_the_goal_what_was_done_and_the_newest_screen() -> None:
    table = await sit_before(context="latest", instruction="Be quick.")
    streams = [table.prompts[""].stream]
    for text in (TAP, "what?", TAP):
        step = await table.say(text)
        streams.append(step.stream)
    assert len(set(streams)) == 4
    screen = tell(ELEMENTS, False)
    refused = "That is no action: there is no JSON object in what you say."
    assert table.steps[1].messages[0].text == f"Be quick.\nTask: Break it.\nYou did:\n{TAP}\n{refused}\n{screen}"
    assert table.seen == f"Be quick.\nTask: Break it.\nYou did:\n{TAP}\n{TAP}\n{screen}"
    whole = await sit_before(instruction="")
    assert whole.prompt == f"Task: Break it.\n{screen}" and (await whole.say(TAP)).stream == ""


# --- the page's tasks, without the page -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_not_done_at_the_beginning_and_its_row_and_seed_decide_it(name: str) -> None:
    drawn = []
    for seed in (0, 0, 1, 2, 3, 4):
        random = Random(seed)
        data = phone_data(random, True)
        task = make_task(name, random, data)
        assert not task.is_done(phone_state(data), None), task.goal
        assert json.loads(json.dumps(data)) == data
        drawn.append((task.goal, json.dumps(data)))
    assert drawn[0] == drawn[1] and len({goal for goal, _ in drawn}) > 1 and len(set(drawn)) == 5


def test_an_answer_is_compared_without_signs_and_anything_else_that_changed_counts() -> None:
    random = Random(3)
    data = phone_data(random, False)
    task = make_task("find_number", random, data)
    assert task.answer is not None
    state = phone_state(data)
    assert task.is_done(state, f" {task.answer.replace('-', ' ')}.") and not task.is_done(state, "555")
    data["settings"]["wifi"] = not data["settings"]["wifi"]
    assert not task.is_done(state, task.answer)


def test_tasks_for_taps_need_nothing_else() -> None:
    for name in TAPS:
        random = Random(name)
        assert {verb for verb, *_ in make_task(name, random, phone_data(random, True)).way} == {"tap"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"tasks": ["open_ap"]}, "no such task as tasks = 'open_ap': did you mean open_app"),
        ({"tasks": []}, "at least 1 item"),
        ({"actions": "number", "tasks": ["send_message"]}, "these tasks need more: send_message"),
        ({"actions": "number", "tasks": ["open_app"], "observation": "screenshot"}, "shows no numbers"),
        ({"scale": 9}, "less than or equal to 4"),
        ({"page": "http://x"}, "PhonePage knows: actions"),
    ],
)
def test_a_wrong_config_of_the_page_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("phone_page", config, elsewhere=True)


def test_a_machine_without_chromium_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="apt-get install --no-install-recommends chromium"):
        check("phone_page", {})
    for name in PROGRAMS[1:]:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert program() == str(tmp_path / "chromium-browser")


# --- leases and screens over HTTP -------------------------------------------------------------------------------------


def test_a_phone_has_one_lease_at_a_time(tmp_path: Path) -> None:
    place = tmp_path / "phones"
    first = leases.take("http://a:1", place)
    assert first is not None and leases.take("http://a:1/", place) is None
    other = leases.take("http://a:2", place)
    assert other is not None
    first.release()
    first.release()
    again = leases.take("http://a:1", place)
    assert again is not None
    again.release()
    other.release()


HOLD = """
import sys, time
from pathlib import Path
from opentinker.envs.phones import leases
held = leases.take("http://a:1", Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert leases.take("http://a:1", tmp_path) is None, "another process has it"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lease = leases.take("http://a:1", tmp_path)
    assert lease is not None
    lease.release()
    holder.stdout.close()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"detail": "no"}', "it does not begin like a screen"),
        (b'{"pixels":[[[1,2,3]]', "it does not end like a screen"),
        (b'{"pixels":[[[1,2,300]]]}', "a number is not from 0 to 255"),
        (b'{"pixels":[[[1,-2,3]]]}', "a number is not from 0 to 255"),
        (b'{"pixels":[[[1,"a",3]]]}', "something other than numbers"),
        (b'{"pixels":[[[1,2]]]}', "not of one length"),
        (b'{"pixels":[[[1,2,3],[1,2,3]],[[1,2,3]]]}', "not of one length"),
        (b'{"pixels":[[[' + b"]]," * 100_000, "something other than numbers"),
    ],
)
def test_what_is_no_screen_is_refused(raw: bytes, why: str) -> None:
    reader = PixelReader()
    with pytest.raises(BadReply, match=why):
        for at in range(0, len(raw), 16_384):
            reader.feed(raw[at : at + 16_384])
        reader.finish()
