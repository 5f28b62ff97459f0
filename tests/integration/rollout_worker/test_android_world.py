"""Tasks of AndroidWorld on simulated phones: behind the server of this package, and one that shows pixels alone."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.phones import android_server
from opentinker.envs.phones.pixels import PixelReader
from opentinker.envs.registry import check
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.types.core import Ending, Image, StopReason
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, StepSession
from opentinker.shared.types.errors import SpecError
from tests.conftest import free_port, soon, until
from tests.support.playing import deed, named, sit, tap
from tests.support.simulated_phone import LIBRARY, served_phone, served_phones

WIFI, BLUETOOTH, ADD, ASK = "SystemWifiTurnOff", "SystemBluetoothTurnOn", "ContactsAddContact", "ContactsFindNumber"


@pytest.fixture(scope="module")
def phones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    events = tmp_path_factory.mktemp("events")
    with served_phones(2, events) as urls:
        yield urls, events


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(LOOPBACK))
    monkeypatch.setenv("OPENTINKER_DATA_DIR", str(tmp_path))


@contextmanager
def pixels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A phone whose server has only the routes of AndroidWorld's own."""
    monkeypatch.syspath_prepend(LIBRARY)
    from android_world.env.env_launcher import load_and_setup_env

    server = android_server.PhoneHttpServer(android_server.PhoneDevice(load_and_setup_env()), "127.0.0.1", 0)
    del server.routes["GET", "/state"]
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        forget_library()


def forget_library() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "android_world"]:
        del sys.modules[name]


DONE = deed("status", goal_status="complete")


async def test_a_task_is_played_by_numbers_of_elements_and_checked_by_itself(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    table = await sit("android_world", 3, 1, phones=urls, tasks=[ADD])
    goal = re.search(r"Create a new contact for (\w+). Their number is ([\d-]+)", table.prompt)
    assert goal is not None and '[0] Button "Contacts"\n[1] Button "Settings"' in table.prompt
    await tap(table, 'Button "Contacts"')
    await tap(table, 'Button "New contact"')
    await table.say(deed("input_text", index=named(table.seen, 'EditText "Name"'), text=goal[1]))
    assert f'[0] EditText "Name" value="{goal[1]}" focused' in table.seen
    await table.say("Action: " + deed("input_text", index=named(table.seen, 'EditText "Phone"'), text=goal[2]))
    await tap(table, 'Button "Save"')
    assert f'TextView "{goal[1]} {goal[2]}"' in table.seen
    last = await table.say(DONE)
    assert (last.done, last.reward) == (True, 1.0)
    assert last.metrics == {"solved": 1.0, "actions": 6.0, "illegal": 0.0}
    await table.environment.close()


async def test_the_same_row_and_seed_begin_alike_on_any_phone(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    prompts = []
    for phone, row, seed in ((0, 0, 5), (1, 0, 5), (0, 0, 6), (0, 1, 5)):
        table = await sit("android_world", row, seed, phones=[urls[phone]])
        prompts.append(table.prompt)
        await table.environment.close()
    assert prompts[0] == prompts[1] and len(set(prompts)) == 3


async def test_what_is_not_done_or_not_said_to_be_done_has_no_reward(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    config: dict[str, Any] = {"phones": urls, "tasks": [WIFI]}
    early = await sit("android_world", **config)
    assert (await early.say(DONE)).reward == 0.0
    await early.environment.close()
    late = await sit("android_world", **config, max_steps=2)
    await tap(late, 'Button "Settings"')
    await tap(late, 'Switch "Wi-Fi" on')
    assert late.steps[-1].done and late.steps[-1].truncated and late.totals[""] == 0.0
    await late.environment.close()


async def test_an_answer_ends_the_task_and_is_checked(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    table = await sit("android_world", 0, 3, phones=urls, tasks=[ASK])
    await table.say(deed("open_app", app_name="Contacts"))
    number = re.search(r'TextView "\w+ ([\d-]+)"', table.seen)
    assert number is not None
    assert (await table.say(deed("answer", text=number[1]))).reward == 1.0
    await table.environment.close()


async def test_a_model_that_sees_gets_pictures_and_names_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen of 216 x 480 pixels is shown at a third of its size; points are those of the picture."""
    with pixels_alone(monkeypatch) as url:
        check_config = {"phones": [url], "tasks": [WIFI], "observation": "screenshot", "max_side": 200}
        await asyncio.to_thread(check, "android_world", check_config)
        table = await sit("android_world", **check_config)
        first = next(iter(table.prompts.values())).messages[-1]
        picture = first.content[1]
        assert isinstance(picture, Image) and picture.data.startswith(b"\x89PNG")
        assert int.from_bytes(picture.data[16:20]) == 72 and int.from_bytes(picture.data[20:24]) == 160
        assert '"x": X, "y": Y' in first.text and "Button" not in first.text
        assert "is not on the screen, which is 72 x 160" in (await table.say(deed("click", x=72, y=5))).messages[0].text
        await table.say(deed("click", x=36, y=22))  # Settings
        await table.say(deed("click", x=36, y=9))  # Wi-Fi
        assert (await table.say(DONE)).reward == pytest.approx(1.0)
        await table.environment.close()


async def test_both_come_from_one_request(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    table = await sit("android_world", phones=urls, tasks=[BLUETOOTH], observation="both", positions=True, max_side=240)
    seen = next(iter(table.prompts.values())).messages[-1]
    assert isinstance(seen.content[1], Image)
    assert '[1] Button "Settings" at (54, 32)' in seen.text
    await table.say(deed("click", x=54, y=32))
    assert '[1] Switch "Bluetooth" off at (54, 32)' in table.seen
    await table.environment.close()


async def test_a_phone_plays_one_episode_at_a_time(phones: tuple[list[str], Path]) -> None:
    urls, events = phones

    async def play() -> float:
        table = await sit("android_world", phones=urls, tasks=[WIFI])
        await table.say(deed("open_app", app_name="Settings"))
        await tap(table, 'Switch "Wi-Fi"')
        reward = (await table.say(DONE)).reward
        await table.environment.close()
        return reward

    assert await soon(asyncio.gather(*(play() for _ in range(6)))) == [1.0] * 6
    for phone in range(2):
        told = (events / str(phone)).read_text().split()[::2]
        assert told == ["begin", "end"] * (len(told) // 2), "no episode began before the last one had ended"


async def test_the_clock_of_an_episode_stands_still_while_it_waits_for_a_phone(phones: tuple[list[str], Path]) -> None:
    urls, _ = phones
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=False))
    config: dict[str, object] = {"phones": urls[:1], "tasks": [WIFI]}

    def opening(session: str, deadline_s: float, answer_within_s: float = 300.0) -> OpenSession:
        return OpenSession(job="j", session=session, environment="android_world", config=config, row=0, seed=0,
                           deadline_s=deadline_s, answer_within_s=answer_within_s)  # fmt: skip

    first = await sessions.open(opening("first", 300.0))
    assert first.failure is None, first.error
    waits = await sessions.open(opening("second", 30.0, 0.1))
    assert waits.opening and waits.importing_s > 30.0, "what runs is not the episode's clock"
    await sessions.close(CloseSession(session="first"))
    second = await sessions.open(opening("second", 30.0))
    assert second.failure is None and not second.opening
    step = StepSession(session="second", turn=0, text=DONE, stop=StopReason.EOS)
    assert (await sessions.step(step)).done
    await sessions.drain(0.01)


async def test_a_phone_that_is_gone_is_left_out_and_an_episode_is_lost_only_if_all_are(
    phones: tuple[list[str], Path],
) -> None:
    urls, _ = phones
    nobody = f"http://127.0.0.1:{free_port()}"
    table = await sit("android_world", phones=[nobody, urls[0]], tasks=[WIFI])
    await table.environment.close()
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=False))
    await asyncio.to_thread(check, "android_world", {"phones": [nobody, urls[0]], "tasks": [WIFI]})
    with served_phone() as short_lived:
        config: dict[str, object] = {"phones": [short_lived]}
        request = OpenSession(job="j", session="s", environment="android_world", config=config, row=0, seed=0,
                              deadline_s=300.0, answer_within_s=300.0)  # fmt: skip
        assert (await sessions.open(request)).failure is None
    step = StepSession(session="s", turn=0, text=deed("navigate_home"), stop=StopReason.EOS)
    assert (await sessions.step(step)).failure == Ending.ENV_LOST
    await sessions.drain(0.01)
    await until(lambda: sessions.active == 0)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "phones: is needed"),
        ({"phones": []}, "at least 1 item"),
        ({"phones": ["ftp://x"]}, "is not a URL of the form"),
        ({"phones": ["http://10.1.2.3:5000?a=1"]}, "without a query"),
        ({"phones": ["http://127.0.0.1:5000", "http://127.0.0.1:5000/"]}, "stands there twice"),
        ({"phones": ["http://127.0.0.1:PORT"]}, "no phone answers"),
        ({"phones": ["http://127.0.0.1:PORT"], "max_side": 10}, "greater than or equal to 64"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], problem: str) -> None:
    text = json.dumps(config).replace("PORT", str(free_port()))
    with pytest.raises(SpecError, match=problem):
        check("android_world", json.loads(text))


def test_what_a_phone_lacks_is_said_at_submission(
    phones: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, _ = phones
    with pytest.raises(SpecError, match=r"no such task on .*did you mean SystemWifiTurnOff"):
        check("android_world", {"phones": urls, "tasks": ["SystemWifiTurnOf"]})
    with pixels_alone(monkeypatch) as url:
        with pytest.raises(SpecError, match=r"shows pixels alone .* use observation = 'screenshot'"):
            check("android_world", {"phones": [*urls, url]})
        check("android_world", {"phones": [*urls, url], "observation": "screenshot"})


async def test_a_server_tells_what_is_wrong_with_a_request(phones: tuple[list[str], Path]) -> None:
    import aiohttp

    urls, _ = phones
    async with aiohttp.ClientSession(urls[0]) as http:

        async def answer(method: str, route: str, **more: Any) -> tuple[int, str]:
            async with http.request(method, route, **more) as response:
                return response.status, (await response.json())["detail"]

        assert await answer("GET", "/nothing") == (404, "there is no GET /nothing")
        assert await answer("GET", "/task/goal?task_type=x&task_idx=0") == (404, "there is no task 'x'")
        assert await answer("GET", f"/task/goal?task_type={WIFI}&task_idx=7") == (404, f"{WIFI} has the numbers 0 to 0")
        assert await answer("GET", "/task/goal?task_type=x") == (422, "task_idx is missing")
        assert (await answer("GET", "/task/goal?task_type=x&task_idx=a"))[0] == 422
        assert await answer("GET", "/suite/reinitialize?task_family=x") == (400, "there is no family x")
        assert (await answer("POST", "/execute_action", data=b"[]"))[0] == 422
        assert (await answer("POST", "/execute_action", json={"action_type": "fly"}))[0] == 422
        status, why = await answer("POST", "/execute_action", json={"action_type": "click", "index": 99})
        assert (status, why.split(":")[0]) == (500, "IndexError")


def test_screens_are_read_piece_by_piece() -> None:
    import numpy as np

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    for separators in ((",", ":"), (", ", ": ")):
        raw = json.dumps({"pixels": pixels.tolist()}, separators=separators).encode()
        for size in (1, 7, 64, 10_000):
            reader = PixelReader()
            for at in range(0, len(raw), size):
                reader.feed(raw[at : at + size])
            assert (reader.finish() == pixels).all()


# --- the published game, on the library of its process ----------------------------------------------------------------


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The class, where the simulated library is installed."""
    from opentinker.environment.android_world import AndroidWorldGame

    monkeypatch.syspath_prepend(LIBRARY)
    monkeypatch.setattr(AndroidWorldGame, "_devices", {})
    found: Any = AndroidWorldGame
    yield found
    forget_library()


def test_the_published_game_plays_a_task_with_the_published_rewards(game: type[Any]) -> None:
    played = game(max_steps=4, task_types=[WIFI])
    assert set(played.generate_initial_state()) == {"task_type", "seed"}
    first = played.reset(**played.generate_initial_state())
    assert first == 'Task: Turn wifi off.\n[0] Button "Contacts"\n[1] Button "Settings"'
    wrong = played.step("wifi off, please")
    assert (wrong.reward, wrong.done) == (-0.1, False) and "That is no action" in wrong.observation
    opened = played.step('Reason: it is there. Action: {"action_type": "click", "index": 1}')
    assert (opened.reward, opened.observation.splitlines()[1]) == (-0.01, '[0] Switch "Wi-Fi" on')
    played.step(deed("click", index=0))
    last = played.step(DONE)
    assert (last.reward, last.done, last.info["success"]) == (10.0, True, 1.0)
    played.close()


def test_the_published_game_ends_out_of_time_and_unsolved_alike(game: type[Any]) -> None:
    for texts in ([DONE], [deed("wait"), deed("wait")], [deed("status", goal_status="infeasible")]):
        played = game(max_steps=2, task_types=[WIFI])
        played.reset(seed=3)
        *_, last = [played.step(text) for text in texts]
        assert (last.reward, last.done) == (-1.0, True)
        played.close()


def test_a_phone_of_the_published_game_has_one_episode(game: type[Any]) -> None:
    first, second, other = game(), game(), game(emulator_console_port=5558)
    first.reset(seed=1)
    with pytest.raises(RuntimeError, match="console port 5556 is taken: give each game server a separate phone"):
        second.reset(seed=1)
    other.reset(seed=1)
    first.close()
    second.reset(seed=1)
    for played in (second, other):
        played.close()
    with pytest.raises(ValueError, match="use_shared_env"):
        game(use_shared_env=True)


def test_without_the_library_the_published_game_says_so() -> None:
    from opentinker.environment.android_world import AndroidWorldGame

    played: Any = AndroidWorldGame()  # type: ignore[operator]
    with pytest.raises(ImportError, match="android_world is not installed here"):
        played.reset()
