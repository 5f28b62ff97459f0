"""What an environment does to the process that plays it stays with its own job, and mostly with its own episode.

The list is in hostile_environments.py; both levels withstand it, and the sandboxed one is tried at night. What
sandboxed code tries against the machine is in test_sandbox.py and test_isolation.py.
"""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.shared.config import Settings
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import CloseSession, SessionReply
from tests.conftest import soon, until
from tests.integration.access.sandboxes.sandbox_worker import Worker
from tests.support.cluster import PYTHONPATH
from tests.support.listening import runs

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOSTILE = "tests.samples.hostile_environments:Hostile"
UNTOUCHED = {"HOME": True, "patched": [], "threads": 1, "processes": [], "episodes": 0}
LEAVES_THINGS = [
    *("patch", "directory", "thread", "daemon_thread", "processes", "sessions_of_their_own", "deaf_process", "forked"),
    *("orphan", "fork_bomb"),
]
ENDS = {
    **dict.fromkeys(("leave", "die", "segfault", "kill_parent", "signal_parent"), "process ended"),
    "system_exit": "SystemExit",
    "recursion": "RecursionError",
    "interrupt": "KeyboardInterrupt",
    "generator_exit": "GeneratorExit",
    "cancelled": "CancelledError",
    "descriptors": "Too many open files",
    "memory": "MemoryError",
}


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["process", pytest.param("sandbox", marks=pytest.mark.nightly)]
)
async def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", PYTHONPATH)
        settings = Settings(data_dir=tmp_path_factory.mktemp("data"), env_modules=True, sandbox_memory_mb=1024)
        worker = Worker(settings, await Sandboxes.open(settings))
        worker.isolation = request.param
        yield worker
        await worker.sessions.drain(0.01)
        await worker.host.close()
        await worker.sandboxes.close()


class Neighbour:
    """A session of another job, and of the same environment, which plays on whatever happens."""

    def __init__(self, worker: Worker, session: str) -> None:
        self._worker, self._session = worker, session
        self._turn = -1

    async def plays_on(self) -> dict[str, Any]:
        self._turn += 1
        return looked(await soon(self._worker.step(self._session, turn=self._turn)))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def neighbour(worker: Worker) -> Neighbour:
    session, opened = await worker.open(HOSTILE, "neighbour", deadline_s=600.0)
    assert looked(opened)["episodes"] == 0
    return Neighbour(worker, session)


def looked(reply: SessionReply) -> dict[str, Any]:
    assert reply.failure is None and not reply.busy, reply.error
    seen: dict[str, Any] = ast.literal_eval(str(reply.messages[0].content))
    return seen


async def close(worker: Worker, session: str) -> None:
    await worker.sessions.close(CloseSession(session=session))
    await until(lambda: not worker.sessions._closing)


@pytest.mark.parametrize("how", LEAVES_THINGS)
async def test_what_an_episode_leaves_behind_ends_with_it(worker: Worker, neighbour: Neighbour, how: str) -> None:
    """Its patches stay with its job, which has a process of its own."""
    session, opened = await worker.open(HOSTILE, how, how=how)
    before, after = looked(opened), looked(await soon(worker.step(session)))
    changed = {key for key in before if before[key] != after[key]} - {"episodes"}
    assert changed or how == "daemon_thread", "the behaviour is broken"
    await close(worker, session)
    again, opened = await worker.open(HOSTILE, how)
    now = looked(opened)
    if how != "patch":
        assert {**now, "pid": 0, "episodes": 0} == {**UNTOUCHED, "pid": 0, "cwd": before["cwd"]}
    assert now["episodes"] == (how != "thread"), "only a thread costs the process"
    await close(worker, again)
    other = await neighbour.plays_on()
    assert {**other, "pid": 0} == {**UNTOUCHED, "episodes": 1, "pid": 0, "cwd": before["cwd"]}


@pytest.mark.parametrize("how", ENDS)
async def test_who_ends_itself_ends_no_other_job(worker: Worker, neighbour: Neighbour, how: str) -> None:
    if how in ("kill_parent", "signal_parent") and worker.isolation == "sandbox":
        pytest.skip("the first process of a sandbox hears no signal of those inside")
    session, opened = await worker.open(HOSTILE, "ends", how=how)
    looked(opened)
    reply = await soon(worker.step(session))
    assert (reply.failure, ENDS[how] in reply.error) == (Ending.ENV_ERROR, True), reply.error
    await neighbour.plays_on()


async def test_directories_and_processes_are_an_episodes_own(worker: Worker) -> None:
    """Of two that take turns in one child; what is started without the variable is for both."""
    worker.host._limit, limit = 1, worker.host._limit
    first, opened = await worker.open(HOSTILE, "two", how="directory")
    second, beside = await worker.open(HOSTILE, "two", how="processes")
    start = looked(opened)["cwd"]
    assert looked(beside)["pid"] == looked(opened)["pid"]
    assert looked(await worker.step(first))["cwd"] == "/usr"
    seen = looked(await worker.step(second))
    assert (seen["cwd"], len(seen["processes"])) == (start, 4)
    assert looked(await worker.step(first, turn=1))["cwd"] == "/usr"
    third, _ = await worker.open(HOSTILE, "two", how="shared_process")
    assert len(looked(await worker.step(third))["processes"]) == 5
    await close(worker, first)
    await close(worker, third)
    assert len(looked(await worker.step(second, turn=1))["processes"]) == 5
    await close(worker, second)
    last, opened = await worker.open(HOSTILE, "two")
    assert len(looked(opened)["processes"]) == 1
    await close(worker, last)
    worker.host._limit = limit


async def test_a_game_that_blocks_holds_up_its_own_job_alone(worker: Worker, neighbour: Neighbour) -> None:
    """However many of its episodes block in all children that it can have."""
    blocked = [(await worker.open(HOSTILE, "blocks", how="block", deadline_s=600.0))[0] for _ in range(6)]
    playing = [asyncio.create_task(worker.step(session)) for session in blocked]
    own = {child for child in worker.host._children if child.key.startswith(f"{HOSTILE} of blocks")}
    assert own
    session, opened = await worker.open(HOSTILE, "other")
    looked(opened)
    looked(await soon(worker.step(session)))
    await neighbour.plays_on()
    assert not any(task.done() for task in playing)
    for one in blocked:
        await worker.sessions.close(CloseSession(session=one))
    await soon(asyncio.gather(*playing))
    await close(worker, session)
    await soon(asyncio.gather(*(child.ended() for child in own)))


async def test_first_children_have_a_bound_too(worker: Worker) -> None:
    await until(lambda: not worker.sessions._closing)
    held = len(worker.host._children)
    limits = worker.host._limit, worker.host._spare
    worker.host._limit, worker.host._spare = 1, 1
    busy = [child for child in worker.host._children if child.sessions]
    assert busy and held
    _, refused = await worker.open(HOSTILE, "one too many")
    idle = held > len(busy)
    assert refused.busy != idle
    worker.host._limit, worker.host._spare = limits


@pytest.mark.parametrize("how", ["sessions_of_their_own", "deaf_process", "orphan", "fork_bomb"])
async def test_what_an_environment_has_started_ends_with_its_child(worker: Worker, how: str) -> None:
    if worker.isolation == "sandbox":
        pytest.skip("its process ids mean nothing outside")
    session, _ = await worker.open(HOSTILE, "kept", how=how)
    started = looked(await worker.step(session))["processes"]
    assert started and all(runs(pid) for pid in started)
    (child,) = [one for one in worker.host._children if one.key.startswith(f"{HOSTILE} of kept") and not one.gone]
    child.kill("the test says so")
    await soon(child.ended())
    await until(lambda: not any(runs(pid) for pid in started))
    await close(worker, session)


async def test_what_an_environment_has_started_ends_with_the_worker() -> None:
    """Killed at once, so that nothing of it can clear up."""
    code = (
        "import asyncio, sys\n"
        "from opentinker.envs.runtime.child_pool import ChildPool\n"
        "from opentinker.envs.runtime.resolver import Resolver\n"
        "from opentinker.envs.runtime.sessions import Sessions\n"
        "from opentinker.shared.types.env_protocol import OpenSession, StepSession\n"
        "from opentinker.shared.types.core import StopReason\n"
        "async def main():\n"
        "    host = ChildPool(children=1, per_child=1, modules=True)\n"
        "    sessions = Sessions('w', limit=1, resolver=Resolver(modules=True), host=host)\n"
        "    await sessions.open(OpenSession(job='j', session='s', environment=sys.argv[1], config={'how': 'orphan'},\n"
        "                                    row=0, seed=0, deadline_s=60.0, answer_within_s=60.0))\n"
        "    reply = await sessions.step(StepSession(session='s', turn=0, text='', stop=StopReason.EOS))\n"
        "    print(reply.messages[0].content, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", code, HOSTILE, stdout=PIPE, env=environ)
    assert service.stdout is not None
    seen = ast.literal_eval((await soon(service.stdout.readline())).decode())
    started = [seen["pid"], *seen["processes"]]
    assert len(started) == 2 and all(runs(pid) for pid in started)
    service.send_signal(signal.SIGKILL)
    await service.wait()
    await until(lambda: not any(runs(pid) for pid in started))
