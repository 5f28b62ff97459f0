"""Imports of environments that take long, fail or never end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    IMPORTED,
    OPEN,
    CloseSession,
    EnvCheck,
)
from tests.conftest import soon, until
from tests.samples import env_samples
from tests.samples.slow_imports import Gate, alive, write_module
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import opening


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_an_import_that_takes_long_blocks_nobody_and_runs_once(
    host: ChildPool, sessions: Sessions, modules: Path
) -> None:
    began, gate = modules / "began", modules / "gate"
    code = f"""
import time
from pathlib import Path
from tests.samples.env_samples import Counting
with Path({str(began)!r}).open("a") as file:
    file.write("once")
while not Path({str(gate)!r}).exists():
    time.sleep(0.01)
"""
    write_module(modules, "slow_module", code)
    await sessions.open(opening(session="other", turns=1000))
    threads = threading.active_count()
    slow = "slow_module:Counting"
    opens = [asyncio.create_task(sessions.open(opening(session=f"s{i}", environment=slow))) for i in range(5)]
    checked = asyncio.create_task(check_environment(EnvCheck(name=slow, config={"x": 1}), sessions._resolver, host))
    await until(began.exists)
    for turn in range(20):
        assert (await sessions.step(step(turn, session="other"))).failure is None
        assert threading.active_count() <= threads + 1
    assert not any(task.done() for task in (*opens, checked))
    gate.touch()
    await asyncio.wait([*opens, checked])
    assert began.read_text() == "once"
    assert [opened.result().failure for opened in opens] == [None] * 5
    assert [error["field"] for error in (await checked).errors] == ["environment.config.x"]


async def test_an_endless_import_times_out(modules: Path) -> None:
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), import_timeout_s=0.3)
    code = "import threading\nEND = threading.Event()\nEND.wait(30)\n"
    write_module(modules, "endless_module", code)
    endless = opening(session="endless", environment="endless_module:X")
    reply, other = await asyncio.gather(sessions.open(endless), sessions.open(opening(session="other")))
    assert (reply.failure, other.failure) == (Ending.ENV_TIMEOUT, None)
    sys.modules["endless_module"].END.set()


async def test_a_check_has_a_time_limit_and_says_so(host: ChildPool, modules: Path) -> None:
    write_module(modules, "stuck_module", "import threading\nEND = threading.Event()\nEND.wait(30)\n")
    check = EnvCheck(name="stuck_module:X", config={})
    (mistake,) = (await soon(check_environment(check, Resolver(modules=True, check_s=0.2), host))).errors
    assert mistake["field"] == "environment.name" and "took more than 0.2 s" in mistake["problem"]
    sys.modules["stuck_module"].END.set()


async def test_the_library_of_what_blocks_is_imported_by_children_alone(host: ChildPool, sessions: Sessions) -> None:
    for size, problem in ((1, ""), (9, "tabnanny has no such size")):
        check = EnvCheck(name="tests.samples.env_samples:Heavy", config={"size": size})
        found = (await check_environment(check, sessions._resolver, host)).errors
        assert [problem in mistake["problem"] for mistake in found] == [True] * bool(problem)
    assert "tabnanny" not in sys.modules


async def test_settings_are_read_in_a_thread_before_the_event_loop_needs_them(sessions: Sessions) -> None:
    threads = env_samples.Reading.Config.threads
    threads.clear()
    for name in "abc":
        opened = await sessions.open(opening(name, "tests.samples.env_samples:Reading", tag="x"))
        assert opened.failure is None, opened.error
    first, *later = threads
    assert first == "environment-import" and later == [threading.main_thread().name] * 3


@pytest.mark.parametrize("code", ["import sys\nsys.exit(3)", "raise StopIteration", "1 / 0"])
async def test_a_module_that_raises_is_explained_and_tried_again(
    host: ChildPool, sessions: Sessions, modules: Path, code: str
) -> None:
    name = f"raising_{abs(hash(code))}"
    write_module(modules, name, code)
    reply = await sessions.open(opening(environment=f"{name}:Counting"))
    assert reply.failure == Ending.ENV_ERROR and name in reply.error
    errors = (await check_environment(EnvCheck(name=f"{name}:Counting", config={}), sessions._resolver, host)).errors
    assert [error["field"] for error in errors] == ["environment.name"]
    write_module(modules, name, "from tests.samples.env_samples import Counting")
    assert (await sessions.open(opening(session="again", environment=f"{name}:Counting"))).failure is None


@pytest.mark.parametrize("blocking", [False, True])
async def test_import_does_not_count_as_time_of_the_episode(sessions: Sessions, modules: Path, blocking: bool) -> None:
    gate = Gate(modules, blocking=blocking)
    began, deadline_s = time.monotonic(), 1.0
    request = msgspec.structs.replace(opening(environment=gate.environment, deadline_s=deadline_s), answer_within_s=0.0)
    told = await sessions.open(request)
    assert told.opening and deadline_s < told.importing_s <= 120.0
    imported = asyncio.create_task(sessions.step(step(IMPORTED)))
    await until(lambda: time.monotonic() > began + deadline_s)
    assert not imported.done()
    gate.file.touch()
    assert (await imported).failure is None
    assert (await sessions.step(step(OPEN))).messages
    hung = await sessions.open(opening("h", gate.environment, deadline_s=0.3, tag="hang"))
    assert hung.failure == Ending.ENV_TIMEOUT and "the episode's 0.3 s were over (last request: open)" in hung.error


async def test_a_hung_child_import_ends(host: ChildPool, modules: Path) -> None:
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host, import_timeout_s=5.0)
    gate = Gate(modules, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    late = await sessions.open(opening(environment=gate.environment, deadline_s=0.1))
    assert late.failure == Ending.ENV_TIMEOUT
    assert "was not imported within 5 s (operator setting env_import_timeout_s)" in late.error
    await until(lambda: not alive(gate.importers()[-1]))
    gate.file.touch()
    assert (await sessions.open(opening("n", gate.environment))).failure is None
    await sessions.drain(0.01)


async def test_an_abandoned_import_ends(sessions: Sessions, modules: Path) -> None:
    gate = Gate(modules, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    opened = asyncio.create_task(sessions.open(opening(environment=gate.environment)))
    await until(lambda: len(gate.importers()) == 2)
    await sessions.close(CloseSession(session="s"))
    assert (await opened).failure == Ending.CANCELLED
    await until(lambda: not alive(gate.importers()[-1]))
