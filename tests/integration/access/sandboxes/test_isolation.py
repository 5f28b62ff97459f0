"""Environments in sandboxes, played through the env worker's sessions: what they may do, and that who attacks ends its
own episode and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from opentinker.envs.runtime.fair_queue import FairQueue
from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.envs.runtime.venv_overlay import RuntimePackages
from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.shared.config import Settings
from opentinker.shared.data.uploads import Pin
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import CloseSession, EnvCheck, EnvCheckReply, EnvRows
from opentinker.shared.types.errors import SpecError
from tests.conftest import soon, until
from tests.integration.access.sandboxes.sandbox_worker import Worker
from tests.integration.access.sandboxes.test_sandbox import DEADLY
from tests.samples import attacks
from tests.samples.upload_samples import PARITY, hostile, package
from tests.support.playing import opening

WITHSTOOD = [name for name in attacks.ATTACKS if name not in DEADLY]


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


# --- playing --------------------------------------------------------------------------------------------------------


async def test_an_agent_asks_its_model_inside_of_its_sandbox(worker: Worker) -> None:
    """Its endpoint listens on the loopback of the sandbox, which no other process can reach."""
    session, opened = await worker.open("tests.samples.agent_samples:Echo")
    assert opened.failure is None, opened.error
    assert opened.messages[0].text == "row 3 seed 4 turn 0="
    assert (await worker.step(session, "yes")).messages[0].text == "row 3 seed 4 turn 1="
    last = await worker.step(session, "yes", 1)
    assert (last.reward, last.done) == (2.0, True)


async def test_an_uploaded_environment_is_played_by_one_warm_child(worker: Worker, tmp_path: Path) -> None:
    name = worker.push(PARITY)
    for text, reward in (("even", 1.0), ("odd", 0.0)):
        session, opened = await worker.open(name)
        assert "even or odd?" in str(opened.messages[0].content), opened.error
        played = await worker.step(session, text)
        assert (played.reward, played.done) == (reward, True)
    assert len(worker.host._children) == 1


async def test_a_child_is_shared_within_a_job_and_never_between_jobs(worker: Worker, tmp_path: Path) -> None:
    name = worker.push(hostile(tmp_path / "hostile"))
    first, again, other = await worker.said(name), await worker.said(name), await worker.said(name, job="another")
    assert first == again
    keys = [child.key for child in worker.host._children]
    assert keys == [f"{name} of j", f"{name} of another"]
    pid, uid, variables = other.split(" ", 2)
    assert int(uid) > 0 and int(pid) < 100
    seen = {
        "ENV_EPISODE",
        "HOME",
        "LANG",
        "OMP_NUM_THREADS",
        "PATH",
        "PWD",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
    }
    assert set(json.loads(variables.replace("'", '"'))) == seen | {"USER"}


COSTLY = """
from opentinker import Environment, Step
from opentinker.envs.base import user


class Small(Environment):
    cost = 8.0

    async def open(self, row, seed):
        return [user("x")]

    async def step(self, action):
        return Step(done=True)
"""


async def test_what_an_upload_costs_counts_in_its_sandbox(worker: Worker, tmp_path: Path) -> None:
    name = worker.push(package(tmp_path / "small", small__py=COSTLY))
    opened = [(await worker.open(name))[1] for _ in range(2)]
    assert [(reply.failure, reply.busy) for reply in opened] == [(None, False)] * 2
    assert worker.sessions.load == 16.0
    assert (await worker.open(name))[1].busy, "a worker of 20 has no room for a third"
    assert (worker.sessions.active, worker.sessions.load) == (2, 16.0)
    together = await asyncio.gather(*(worker.open(worker.push(PARITY)) for _ in range(4)))
    assert [reply.busy for _, reply in together] == [False] * 4
    assert (await worker.open(worker.push(PARITY)))[1].busy


async def test_a_cost_that_a_child_says_is_checked(worker: Worker, tmp_path: Path) -> None:
    code = COSTLY.replace("async def open", "async def open_", 1) + (
        '    async def open(self, row, seed):\n        type(self).cost = float("nan")\n        return [user("x")]\n'
    )
    _, reply = await worker.open(worker.push(package(tmp_path / "small", small__py=code)))
    assert reply.failure == Ending.ENV_BAD_REPLY and "cost must be above 0" in reply.error


async def test_idle_children_make_room(worker: Worker) -> None:
    name = worker.push(PARITY)
    for job in ("a", "b", "c", "d"):
        session, opened = await worker.open(name, job)
        assert opened.failure is None and not opened.busy
        await worker.step(session, "odd")
        await until(lambda: all(child.sessions == 0 for child in worker.host._children))
    assert [child.key[-1] for child in worker.host._children] == ["b", "c", "d"]
    session, _ = await worker.open(name, "d")
    last = worker.host._children[-1]
    last.idle_s = 0.05
    await worker.step(session, "odd")
    await until(lambda: last.gone == "it was idle")
    await last.ended()


async def test_who_waits_for_a_child_gets_one_in_the_end(worker: Worker) -> None:
    worker.host._turns = FairQueue(turn_s=0.0)
    worker.host._limit = worker.host._spare = 1
    name = worker.push(PARITY)
    first, opened = await worker.open(name, "greedy")
    assert opened.failure is None and not opened.busy
    _, refused = await worker.open(name, "patient")
    assert refused.busy
    _, more = await worker.open(name, "greedy")
    assert more.busy, "its child takes no more while somebody waits"
    await worker.step(first, "odd")
    await until(lambda: worker.host._children[0].sessions == 0)
    _, again = await worker.open(name, "greedy")
    assert again.busy, "the place is not its own any more"
    _, placed = await worker.open(name, "patient")
    assert placed.failure is None and not placed.busy
    assert [child.key for child in worker.host._children] == [f"{name} of patient"]


def test_who_stops_asking_does_not_wait() -> None:
    waiting = FairQueue(turn_s=10.0)
    waiting.refused("a", 0.0)
    assert waiting.due(9.0) is None
    for now in range(0, 20, 4):
        waiting.refused("b", float(now))
    assert waiting.due(16.0) == "b"
    waiting.placed("b")
    assert waiting.due(16.0) is None


def test_sandboxes_hold_on_the_loop_that_services_run_on(tmp_path: Path) -> None:
    async def play() -> None:
        settings = Settings(data_dir=tmp_path / "data")
        worker = Worker(settings, await Sandboxes.open(settings))
        name = worker.push(hostile(tmp_path / "hostile"))
        await worker.said(name)
        for attack in ("die", "hang_up"):
            session, _ = await worker.open(name, attack=attack)
            reply = await soon(worker.step(session))
            assert (reply.failure, "process ended" in reply.error) == (Ending.ENV_ERROR, True), reply.error
        session, _ = await worker.open(name, attack="endless")
        child = next(child for child in worker.host._children if child.sessions > 0)
        playing = asyncio.create_task(worker.step(session))
        await asyncio.sleep(0)
        await worker.sessions.close(CloseSession(session=session))
        assert (await playing).failure == Ending.CANCELLED
        await soon(child.ended())
        await worker.host.close()
        await worker.sandboxes.close()

    uvloop.run(play())


async def test_what_the_operator_wrote_can_be_isolated_too(worker: Worker) -> None:
    _, opened = await worker.open("copy_digits", digits=3)
    assert opened.failure is None, opened.error
    variables = await worker.said("tests.samples.env_samples:Blocking", how="variables")
    assert "OPENTINKER_NATS_URL" not in variables and "PYTHONSAFEPATH" in variables


async def test_settings_are_checked_by_the_package_in_a_sandbox(worker: Worker, tmp_path: Path) -> None:
    name = worker.push(PARITY)
    assert await worker.host.check(EnvCheck(name=name, config={"largest": 7}, isolation="sandbox")) == EnvCheckReply(
        seats=[""]
    )
    assert await worker.host.check(EnvCheck(name=name, config=None, isolation="sandbox")) == EnvCheckReply()
    wrong = await worker.host.check(EnvCheck(name=name, config={"largest": "x", "y": 1}, isolation="sandbox"))
    assert {mistake["field"] for mistake in wrong.errors} == {"environment.config.largest", "environment.config.y"}
    broken = worker.push(package(tmp_path / "x", small__py="1 / 0\n"))
    (mistake,) = (await worker.host.check(EnvCheck(name=broken, config=None, isolation="sandbox"))).errors
    assert "ZeroDivisionError" in mistake["problem"]
    assert worker.host._children == []


# --- attacks --------------------------------------------------------------------------------------------------------


ROWS = """from opentinker import Environment, Step
from opentinker.envs.base import DataRows, user

class Few(DataRows):
    def __len__(self):
        return 3
    def number(self, row):
        return row % 3 if row < 9 else "many"
    def prompt(self, number):
        return [user(f"row {number}")] if number else 7

class Small(Environment):
    @classmethod
    def data_rows(cls, config):
        return Few()
    async def open(self, row, seed):
        return [user(f"row {row % 3}")]
"""


async def test_rows_of_an_upload_are_listed_in_its_sandbox(worker: Worker, tmp_path: Path) -> None:
    name = worker.push(package(tmp_path / "package", small__py=ROWS))
    asked = EnvRows(name=name, config={}, isolation="sandbox", job="j", text="ROW 2", numbers=[0, 2])
    reply = await worker.host.rows(asked)
    assert (reply.problem, reply.count, reply.found) == ("", 3, [2])
    wrong, right = reply.rows
    assert right.messages[0].text == "row 2" and "int" in wrong.problem
    _, opened = await worker.open(name)
    assert opened.row == 0
    request = msgspec.structs.replace(opening(name, "many", row=9), isolation="sandbox")
    assert (await worker.sessions.open(request)).failure is Ending.ENV_BAD_REPLY


async def test_attacks_get_errors_and_everybody_goes_on(worker: Worker, tmp_path: Path, listening: str) -> None:
    secret = worker.data / "jobs" / "j-other" / "metrics.jsonl"
    secret.parent.mkdir(parents=True)
    secret.write_text("of another tenant")
    name = worker.push(hostile(tmp_path / "hostile"))
    neighbour, _ = await worker.open(worker.push(PARITY), "another")
    known = {"secret": str(secret), "service": str(os.getpid()), "port": listening}
    for attack in ("kill_everybody", "kill_parent"):  # there is nobody but itself, and a parent that it cannot hurt
        await worker.said(name, attack=attack)
    came = {attack: await worker.said(name, attack=attack, known=known) for attack in WITHSTOOD}
    assert {attack: text for attack, text in came.items() if text.startswith("SUCCEEDED")} == {}
    assert "No such file" in came["host_file"]
    assert len(worker.host._children) == 2
    assert (await worker.step(neighbour, "odd")).failure is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "ending", "words"),
    [
        ("die", Ending.ENV_ERROR, "process ended"),
        ("memory_of_many", Ending.ENV_ERROR, "MB of memory; at most 512 (sandbox_memory_mb)"),
        ("many_files", Ending.ENV_ERROR, "files in /tmp"),
        ("forge", Ending.ENV_ERROR, "an answer of 2,147,483,648 bytes"),
        ("hang_up", Ending.ENV_ERROR, "it closed its socket and went on"),
        ("flood", Ending.ENV_TIMEOUT, "were over"),
        pytest.param("endless", Ending.ENV_TIMEOUT, "were over", marks=pytest.mark.nightly),
    ],
)
async def test_excess_ends_one_episode(worker: Worker, tmp_path: Path, attack: str, ending: Ending, words: str) -> None:
    name = worker.push(hostile(tmp_path / "hostile"))
    neighbour, _ = await worker.open(worker.push(PARITY), "another")
    await worker.said(name)  # the child is warm, so that its start is no part of the deadline
    deadline_s = 60.0 if ending == Ending.ENV_ERROR else 5.0
    session, opened = await worker.open(name, deadline_s=deadline_s, attack=attack)
    assert opened.failure is None, opened.error
    child = next(child for child in worker.host._children if child.key == f"{name} of j")
    reply = await soon(worker.step(session))
    assert (reply.failure, words in reply.error) == (ending, True), reply.error
    await soon(child.ended())
    assert (await worker.step(neighbour, "odd")).failure is None
    assert (await worker.said(name)).startswith(tuple("123456789"))


# --- levels and packages that cannot be had -------------------------------------------------------------------------


async def test_without_sandboxes_a_session_is_refused_with_what_to_do(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, sandbox_bwrap="/no/bwrap")
    worker = Worker(settings, await Sandboxes.open(settings))
    _, opened = await worker.open(worker.push(PARITY))
    assert opened.failure == Ending.ENV_ERROR
    assert "environment.isolation" in opened.error and "give the path of bubblewrap" in opened.error
    assert worker.host._children == []


async def test_an_upload_is_never_played_outside_of_a_sandbox(worker: Worker) -> None:
    opened = await worker.sessions.open(opening(worker.push(PARITY)))
    assert opened.failure == Ending.ENV_ERROR and "environment.name" in opened.error


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"requirements__lock": f"pydantic==2.5.0 --hash=sha256:{'0' * 64}\n"}, "needs pydantic<3,>=2.11"),
        ({"environment__toml": 'name = "small"\nclass = "small:Small"\npython = "<3"\n'}, "is for Python <3"),
    ],
)
async def test_unusable_packages_say_why(worker: Worker, tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        await worker.sandboxes.program(worker.push(package(tmp_path / "x", **files)))


async def test_a_package_that_is_gone_is_said_to_be(worker: Worker) -> None:
    name = worker.push(PARITY)
    Uploads(worker.data, 32).delete("default", "parity", None)
    with pytest.raises(SpecError, match="it was deleted, or this env worker has another data_dir"):
        await worker.sandboxes.program(name)


def test_a_lock_answers_for_what_it_brings_and_we_for_what_we_lend() -> None:
    runtime = RuntimePackages()
    assert {"/runtime/lent/pydantic", "/runtime/lent/numpy", "/runtime/src/opentinker"} <= set(runtime.binds([]))
    theirs = [Pin("pydantic", "2.12.5", ""), Pin("pydantic-core", "2.41.5", ""), Pin("numpy", "2.0.0", "")]
    assert runtime.conflicts(theirs) == []
    lent = set(runtime.binds(theirs))
    assert "/runtime/lent/msgspec" in lent and not {"/runtime/lent/pydantic", "/runtime/lent/numpy"} & lent
    (conflict,) = runtime.conflicts([Pin("pydantic-core", "2.41.5", "")])
    assert conflict.startswith("pydantic-core==2.41.5, and what plays environments here needs pydantic-core==")
    assert runtime.conflicts([Pin("pydantic", "1.0", 'python_version < "3"')]) == []
