"""The phone in a web page, in a real Chromium: every task by its expert, forks, and what it shows."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker.envs.base import play_gold
from opentinker.envs.phones.chromium import PROGRAMS, Chromium, SharedBrowser
from opentinker.envs.phones.page import PAGE, PhonePage
from opentinker.envs.phones.page_tasks import TAPS, TASKS
from opentinker.envs.registry import make
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.core import Image, StopReason
from opentinker.shared.types.env_protocol import EnvCheck, OpenSession, SeatAction, StepSession
from tests.conftest import until
from tests.support.playing import deed, sit, tap

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="no Chromium on this machine: make browser (as root, on Debian)"
)
DONE = '{"action_type": "status", "goal_status": "complete"}'


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[SharedBrowser]:
    """The browser that all tests of this process share."""
    yield PhonePage.browser
    PhonePage.browser._end()


@pytest.mark.parametrize("name", sorted(TASKS))
async def test_an_expert_does_the_task_and_nobody_else(name: str) -> None:
    for row in range(3):
        played = await play_gold(make("phone_page", {"tasks": [name], "context": "latest"}), row, 5)
        assert (played.reward, played.metrics["solved"], played.metrics["illegal"]) == (1.0, 1.0, 0.0), played.messages
        if name in TAPS:
            played = await play_gold(make("phone_page", {"tasks": [name], "actions": "number"}), row, 5)
            assert (played.reward, played.metrics["solved"]) == (1.0, 1.0), played.messages
    idle = await sit("phone_page", 0, 5, tasks=[name])
    assert (await idle.say(DONE)).reward == 0.0


async def test_a_side_effect_costs_the_reward() -> None:
    table = await sit("phone_page", 0, 1, tasks=["add_alarm"])
    environment = table.environment
    await tap(table, 'button "Settings"')
    await tap(table, 'switch "Bluetooth"')
    await table.say(deed("navigate_home"))
    while environment._way < len(environment._task.way):
        await table.say(environment.gold())
    assert (await table.say(DONE)).reward == 0.0
    data, wanted = environment._state["data"], environment._task.data
    assert data["alarms"] == wanted["alarms"] and data["settings"] != wanted["settings"]


async def test_typing_goes_where_the_focus_is_and_back_leaves_a_form() -> None:
    table = await sit("phone_page", 0, 1, tasks=["write_note"])
    await table.say(deed("open_app", app_name="Notes"))
    await tap(table, 'button "New note"')
    await table.say(deed("input_text", text="lost"))
    assert 'value="' not in table.seen, "nothing has the focus"
    await tap(table, 'field "Title"')
    odd = '"<b>` \\ ${1} </script> Zoë 漢'
    await table.say(deed("input_text", text=odd))
    assert f'[1] field "Title" value="{odd}" focused' in table.seen
    await table.say(deed("input_text", text="!"))
    assert f'value="{odd}!"' in table.seen
    await table.say(deed("input_text", index=1, text="new", clear_text=True))
    assert 'field "Title" value="new" focused' in table.seen
    await table.say(deed("keyboard_enter"))
    assert "focused" not in table.seen
    await table.say(deed("navigate_back"))
    assert 'button "New note"' in table.seen
    assert "there is no app 'Camera'" in (await table.say(deed("open_app", app_name="Camera"))).messages[0].text
    assert table.totals[""] == -0.1


async def test_what_is_below_the_screen_is_reached_by_scrolling_and_not_by_a_tap() -> None:
    table = await sit("phone_page", 0, 1, tasks=["set_level"])
    await tap(table, 'button "Settings"')
    assert "Volume" not in table.seen
    await table.say(deed("scroll", direction="down"))
    assert 'button "Volume up"' in table.seen and "Wi-Fi" not in table.seen
    await tap(table, 'button "Volume up"')
    assert 'button "Volume up"' in table.seen, "it stays where it is"
    await table.say(deed("scroll", direction="up"))
    assert 'switch "Wi-Fi"' in table.seen


async def test_a_fork_goes_its_own_way_from_the_same_screen() -> None:
    table = await sit("phone_page", 0, 1, tasks=["switch_setting"], shuffle=False)
    await tap(table, 'button "Settings"')
    first, second = table.environment, copy.deepcopy(table.environment)
    state = json.dumps(first._state)
    assert json.loads(state) == first._state
    wifi = first._state["data"]["settings"]["wifi"]
    await tap(table, 'switch "Wi-Fi"')
    assert first._state["data"]["settings"]["wifi"] is not wifi
    assert json.dumps(second._state) == state
    assert json.dumps((await second._look()).elements, default=repr) == json.dumps(
        second._screen.elements, default=repr
    )


async def test_candidates_of_a_turn_are_played_in_a_child_process() -> None:
    """As tree sampling does it; and what is checked when a job is submitted."""
    host = ChildPool(children=1, per_child=4, modules=False)
    sessions = Sessions("w", limit=99, resolver=Resolver(modules=False), host=host)
    config: dict[str, object] = {"tasks": ["open_app"], "shuffle": False}
    try:
        checked = await host.check(EnvCheck(name="phone_page", config=config, forks=True))
        assert checked.errors == []
        opened = await sessions.open(OpenSession(job="j", session="s", environment="phone_page", config=config, row=0,
                                                 seed=0, deadline_s=300, answer_within_s=300))  # fmt: skip
        assert opened.failure is None, opened.error

        def tree(turn: int, chosen: int, *texts: str) -> StepSession:
            candidates = [[SeatAction(seat="", text=text, stop=StopReason.EOS)] for text in texts]
            return StepSession(
                session="s", turn=turn, text="", stop=StopReason.EOS, candidates=candidates, chosen=chosen
            )

        first = await sessions.step(tree(0, 0, *(deed("click", index=number) for number in range(5))))
        assert first.failure is None, first.error
        screens = [outcome.prompts[0].messages[0].text.splitlines()[0] for outcome in first.outcomes]
        assert screens == ['[0] text "Contacts"', '[0] text "Messages"', '[0] text "Settings"', '[0] text "Alarms"',
                           '[0] text "Notes"']  # fmt: skip
        second = await sessions.step(tree(1, 2, deed("navigate_back"), DONE, deed("click", index=1)))
        assert [outcome.done for outcome in second.outcomes] == [False, True, False]
        assert '[0] button "Contacts"' in second.outcomes[0].prompts[0].messages[0].text
        assert second.outcomes[2].prompts[0].messages[0].text.startswith('[0] text "Settings"\n[1] switch "Wi-Fi"')
    finally:
        await sessions.drain(0.01)
        await host.close()


async def test_a_model_that_sees_gets_the_screen_and_names_points_of_the_picture() -> None:
    table = await sit("phone_page", 0, 1, tasks=["open_app"], observation="screenshot", scale=0.5, shuffle=False)
    shown = next(iter(table.prompts.values())).messages[-1]
    picture = shown.content[1]
    assert isinstance(picture, Image) and "button" not in shown.text
    assert int.from_bytes(picture.data[16:20]) == 180 and int.from_bytes(picture.data[20:24]) == 320
    again = await table.environment._look()
    assert again.picture == picture.data, "nothing blinks"
    left, top, right, bottom = again.elements[3].box
    await table.say(deed("click", x=(left + right) // 2, y=(top + bottom) // 2))
    assert table.environment._state["view"]["stack"][-1]["at"] == ["Clock"]
    assert (await table.environment._look()).picture != picture.data


async def test_a_browser_that_dies_is_replaced_and_nothing_is_lost(browser: SharedBrowser) -> None:
    table = await sit("phone_page", 0, 1, tasks=["send_message"])
    await tap(table, 'button "Messages"')
    before = table.seen
    assert browser._browser is not None
    os.kill(browser._browser._process.pid, signal.SIGTERM)
    await table.say(deed("click", index=0))  # the heading
    assert table.seen == before


async def test_an_idle_browser_is_closed_and_its_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ot-") as place:  # in a test's own, names of its sockets would be too long
        monkeypatch.setenv("TMPDIR", place)
        brief = SharedBrowser(PAGE, 0.01)

        def play(found: Chromium) -> int:
            assert os.listdir(place), "its home is here"
            return found._process.pid

        pid = brief.use(play)
        await until(lambda: brief._browser is None and not Path(f"/proc/{pid}").exists())
        assert not os.listdir(place)
