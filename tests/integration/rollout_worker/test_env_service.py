"""Env worker processes over a real NATS server, seen through the client that the rollout worker uses."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.envs.registry import BUILT_IN
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.messaging.subjects import ENV_CHECK, TIMELINE
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, Pool, StopReason, ToolCall
from opentinker.shared.types.env_protocol import EnvCheck, SessionReply, StepSession, owner_of
from opentinker.shared.types.telemetry import TimelinePart
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, until
from tests.integration.rollout_worker.env_workers import Workers, client, guess, opening, workers
from tests.support.cluster import PYTHONPATH
from tests.support.scheduling import messages

__all__ = ["client", "workers"]

MISBEHAVING = "tests.samples.env_samples:Misbehaving"


async def test_two_workers_share_opens_and_lose_only_their_own(workers: Workers, client: EnvClient) -> None:
    await asyncio.gather(workers.start("env-0"), workers.start("env-1"))
    names = [f"s{i}" for i in range(40)]
    replies = dict(zip(names, await asyncio.gather(*(client.open(opening(name)) for name in names)), strict=True))
    of = {who: [n for n in names if replies[n].worker.startswith(who)] for who in ("env-0", "env-1")}
    assert min(len(held) for held in of.values()) >= 5
    workers.signal("env-0", signal.SIGKILL)
    await workers.end("env-0")
    steps = await asyncio.gather(*(client.step(*guess(replies[name], name)) for name in names))
    for name, step in zip(names, steps, strict=True):
        assert step.failure == (Ending.ENV_LOST if name in of["env-0"] else None), step.error
    again = await client.open(opening("again"))
    assert again.worker.startswith("env-1")


async def test_a_stopped_worker_finishes_its_sessions(workers: Workers, client: EnvClient) -> None:
    await workers.start("env-0")
    held = await client.open(opening("held"))
    await workers.start("env-1")
    workers.signal("env-0", signal.SIGTERM)
    await until(lambda: workers.info("env-0"), lambda info: info is not None and info.status == "draining")
    others = await asyncio.gather(*(client.open(opening(f"o{i}")) for i in range(10)))
    assert all(other.worker.startswith("env-1") for other in others)
    turn = 0
    while not (step := await client.step(*guess(held, "held", turn))).done:
        assert step.failure is None
        turn += 1
    assert await workers.end("env-0") == 0
    assert await workers.info("env-0") is None
    assert (await client.step(*guess(others[0], "o0"))).failure is None


async def test_drain_ends_in_time_and_the_session_left_is_lost(workers: Workers, client: EnvClient) -> None:
    await workers.start("env-0", OPENTINKER_DRAIN_S="0.3")
    held = await client.open(opening("held"))
    workers.signal("env-0", signal.SIGTERM)
    assert await workers.end("env-0") == 0
    assert (await client.step(*guess(held, "held"))).failure == Ending.ENV_LOST


async def test_open_waits_for_a_worker_and_for_room(workers: Workers, client: EnvClient) -> None:
    waiting = asyncio.create_task(client.open(opening("first")))
    await workers.start("env-0", OPENTINKER_ENV_SESSIONS="1")
    first = await waiting
    assert first.failure is None
    second = asyncio.create_task(client.open(opening("second")))
    full = await client.open(opening("third", deadline_s=2.0))
    assert full.failure == Ending.ENV_LOST
    assert "all env workers are full" in full.error
    await client.close(worker=first.worker, session="first")
    assert (await second).failure is None


async def test_who_gives_up_in_line_leaves_no_session_behind(workers: Workers, client: EnvClient) -> None:
    await workers.start("env-0", OPENTINKER_ENV_SESSIONS="1")
    first = await client.open(opening("first"))
    second = asyncio.create_task(client.open(opening("second")))
    await asyncio.sleep(0)  # it has asked
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await client.close(worker=first.worker, session="first")
    third = await client.open(opening("third"))
    assert third.failure is None
    await client.close(worker=third.worker, session="third")
    assert not client._given_up


async def test_an_import_has_its_own_deadline(client: EnvClient, workers: Workers, tmp_path: Path) -> None:
    waiting = "import time\nfrom pathlib import Path\nwhile not Path({!r}).exists():\n    time.sleep(0.01)\n{}"
    gate, kind = tmp_path / "gate", "from tests.samples.env_samples import Counting"
    (tmp_path / "slowly_imported.py").write_text(waiting.format(str(gate), kind))
    (tmp_path / "never_imported.py").write_text(waiting.format(str(tmp_path / "none"), kind))
    places = os.pathsep.join([PYTHONPATH, str(tmp_path)])
    await workers.start("env-0", PYTHONPATH=places, OPENTINKER_ENV_IMPORT_TIMEOUT_S="5")
    began, deadline_s = time.monotonic(), 3.0
    clocks: list[str] = []

    @contextmanager
    def stopped() -> Iterator[None]:
        clocks.append("stopped")
        yield
        clocks.append("goes on")

    opened = asyncio.create_task(client.open(opening("slow", "slowly_imported:Counting", deadline_s), stopped))
    hung = asyncio.create_task(client.open(opening("hung", "never_imported:Counting", deadline_s=1.0)))
    await until(lambda: time.monotonic() > began + deadline_s)
    assert clocks == ["stopped"]
    gate.touch()
    reply = await opened
    assert reply.failure is None and clocks == ["stopped", "goes on"]
    assert (await client.step(*guess(reply, "slow"))).reward == 1.0
    late = await hung
    assert late.failure == Ending.ENV_TIMEOUT and "was not imported within 5 s" in late.error


async def test_a_session_outlives_its_time_by_that_in_which_its_engine_may_sleep(
    client: EnvClient, workers: Workers
) -> None:
    await workers.start("env-0")
    request = msgspec.structs.replace(opening("s", deadline_s=1.0), pauses_s=60.0)
    reply = await client.open(request)
    await asyncio.sleep(1.2)
    assert (await client.step(*guess(reply, "s"))).failure is None


async def test_open_without_any_worker_says_so(client: EnvClient) -> None:
    reply = await client.open(opening("s", deadline_s=0.3))
    assert reply.failure == Ending.ENV_LOST
    assert "no env worker serves it" in reply.error


class Slow:
    """An open that takes until `gate` is touched, asked for again and again, on two workers."""

    def __init__(self, bus: Bus, workers: Workers, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers, self.opens, self.gate = workers, directory / "opens", directory / "gate"
        self.client = EnvClient(bus, ask_s=0.3, gone_s=0.5)
        self.asked = 0
        request = bus.request

        async def counting(*args: Any, **keys: Any) -> Any:
            self.asked += 1
            return await request(*args, **keys)

        monkeypatch.setattr(bus, "request", counting)

    async def open(self) -> asyncio.Task[SessionReply]:
        """Returns when it was asked for often enough to have reached both workers."""
        await asyncio.gather(self.workers.start("env-0"), self.workers.start("env-1"))
        files: dict[str, Any] = {"opens": str(self.opens), "gate": str(self.gate)}
        opened = asyncio.create_task(
            self.client.open(opening("s", "tests.samples.env_samples:Slow", 4 * WAIT_S, **files))
        )
        await until(lambda: self.asked >= 8)
        return opened

    def holder(self) -> str:
        """The worker that opened it last."""
        pid = int(self.opens.read_text().split()[-1])
        return next(name for name, process in self.workers.processes.items() if process.pid == pid)


@pytest.fixture
def slow(bus: Bus, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(bus, workers, tmp_path, monkeypatch)


async def test_slow_open_takes_one_place_on_one_worker(slow: Slow) -> None:
    opened = await slow.open()
    slow.gate.touch()
    reply = await opened
    assert len(slow.opens.read_text().split()) == 1
    assert reply.worker.startswith(slow.holder())
    assert (await slow.client.step(*guess(reply, "s"))).reward == 1.0


async def test_slow_open_on_a_worker_that_dies_is_made_on_another(slow: Slow, workers: Workers) -> None:
    opened = await slow.open()
    first = slow.holder()
    workers.signal(first, signal.SIGKILL)
    await until(lambda: slow.holder() != first)
    slow.gate.touch()
    assert (await opened).failure is None


async def test_slow_open_that_nobody_waits_for_any_more_is_closed(slow: Slow, workers: Workers) -> None:
    opened = await slow.open()
    opened.cancel()
    await asyncio.wait([opened])

    async def empty() -> bool:
        infos = [await workers.info(name) for name in ("env-0", "env-1")]
        return all(info is not None and info.detail["sessions"] == 0 for info in infos)

    await until(empty)  # its deadline is far away


@pytest.mark.parametrize("how", ["sleep", pytest.param("regex", marks=pytest.mark.nightly)])
async def test_a_blocked_loop_is_named(workers: Workers, client: EnvClient, tmp_path: Path, how: str) -> None:
    """`regex` keeps the interpreter's lock as well: then no other thread runs, and the stack alone names it."""
    log = tmp_path / "env-0.log"
    await workers.start("env-0", log, OPENTINKER_WORKER_TTL_S="1")
    stuck = await client.open(opening("stuck", "tests.samples.env_samples:Stuck", how=how))
    other = await client.open(opening("other"))
    replies = await asyncio.gather(client.step(*guess(stuck, "stuck")), client.step(*guess(other, "other")))
    assert replies[0].failure == Ending.ENV_LOST
    assert await workers.end("env-0") == 1
    said = await asyncio.to_thread(log.read_text)
    assert "env_samples.py" in said and "in step" in said
    if how == "sleep":
        assert "event_loop_blocked" in said and "tests.samples.env_samples:Stuck in episode stuck of job j" in said
    await workers.start("env-0")
    again = await client.open(opening("again"))
    assert (await client.step(*guess(again, "again"))).failure is None


async def test_a_nats_restart_loses_no_session(own_server: Server, workers: Workers) -> None:
    workers.nats = own_server
    async with Bus.connect(own_server.url, "test") as bus:
        client = EnvClient(bus, ask_s=0.5, gone_s=3.0)
        await workers.start("env-0")
        held = await client.open(opening("held", "tests.samples.env_samples:Counting"))
        assert (await client.step(*guess(held, "held", 0))).reward == 1.0
        own_server.kill()
        during = asyncio.create_task(client.step(*guess(held, "held", 1)))
        await until(lambda: not bus.nc.is_connected)
        own_server.start()
        assert (await during).reward == 1.0
        assert (await client.step(*guess(held, "held", 2))).done


async def test_check_reports_every_mistake(workers: Workers, bus: Bus) -> None:
    await workers.start("env-0")
    good = await bus.request(ENV_CHECK, EnvCheck(name="copy_digits", config={"digits": 5}), WAIT_S)
    assert good.errors == []
    bad = await bus.request(ENV_CHECK, EnvCheck(name="copy_digits", config={"digits": 0, "colour": "red"}), WAIT_S)
    assert {e["field"] for e in bad.errors} == {"environment.config.digits", "environment.config.colour"}
    unknown = await bus.request(ENV_CHECK, EnvCheck(name="gsm8", config={}), WAIT_S)
    assert "did you mean gsm8k" in unknown.errors[0]["problem"]


async def test_tools_are_checked_and_answer_over_the_bus(workers: Workers, client: EnvClient, bus: Bus) -> None:
    await workers.start("env-0")
    tools: list[dict[str, Any]] = [{"type": "python", "timeout_s": 20.0}, {"type": "mcp", "command": ["server"]}]
    checked = await bus.request(ENV_CHECK, EnvCheck(name="copy_digits", config={}, tools=tools), WAIT_S)
    assert [error["field"] for error in checked.errors] == ["environment.tools.1.command"]
    opened = await client.open(msgspec.structs.replace(opening("s", "copy_digits"), tools=tools[:1], tool_turns=2))
    assert [tool.name for tool in opened.tools] == ["python"]
    call = ToolCall(id="c", name="python", arguments={"code": "6 * 7"})
    asked = StepSession(session="s", turn=0, text="?", stop=StopReason.EOS, tool_calls=[call])
    assert (await client.step(opened.worker, asked)).messages[0].text == "42"


async def test_an_environment_opens_only_files_of_its_tenant(workers: Workers, bus: Bus, tmp_path: Path) -> None:
    own, other = "j-aaaaaaaaaa", "j-bbbbbbbbbb"
    for job in (own, other):
        (tmp_path / "jobs" / job).mkdir(parents=True)
        rows = '{"question": "canary", "answer": "#### 1"}\n'
        (tmp_path / "jobs" / job / "rows.jsonl").write_text(rows)
    (tmp_path / "mine.jsonl").symlink_to(tmp_path / "jobs" / other / "rows.jsonl")
    await workers.start("env-0", OPENTINKER_DATA_DIR=str(tmp_path))
    client = EnvClient(bus, own_jobs=[own], ask_s=1.0, gone_s=0.5)
    config: dict[str, Any] = {"problem": "question", "answer": "answer"}
    for number, place in enumerate(
        (f"jobs/{other}/rows.jsonl", "mine.jsonl", "./" * 3000 + f"jobs/{other}/rows.jsonl")
    ):
        path = f"{tmp_path}/{place}"
        reply = await client.open(opening(f"s{number}", "math", path=path, **config))
        assert reply.failure is Ending.ENV_ERROR and "kept by the server" in reply.error, reply
        checked = await bus.request(ENV_CHECK, EnvCheck(name="math", config={"path": path, **config}), 10.0)
        assert "kept by the server" in checked.errors[0]["problem"]
    reply = await client.open(opening("own", "math", path=f"{tmp_path}/jobs/{own}/rows.jsonl", **config))
    assert reply.failure is None and "canary" in reply.messages[0].text, reply


async def test_module_environments_are_refused_without_leave(workers: Workers, client: EnvClient, bus: Bus) -> None:
    await workers.start("env-0", OPENTINKER_ENV_MODULES="0")
    checked = await bus.request(ENV_CHECK, EnvCheck(name=MISBEHAVING, config={}), WAIT_S)
    assert "env_modules" in checked.errors[0]["problem"]
    assert (await client.open(opening("s", MISBEHAVING, deadline_s=0.5))).failure == Ending.ENV_LOST
    assert (await client.open(opening("t"))).failure is None


async def test_a_worker_without_sandboxes_says_why(workers: Workers, client: EnvClient) -> None:
    await workers.start("env-0", OPENTINKER_SANDBOX_BWRAP="/no/bwrap")
    info = await workers.info("env-0")
    assert info is not None and "give the path of bubblewrap" in info.detail["no_sandbox"]
    isolated = msgspec.structs.replace(opening("s", deadline_s=1.0), isolation="sandbox")
    refused = await client.open(isolated)
    assert refused.failure == Ending.ENV_LOST and "no env worker has sandboxes" in refused.error
    await workers.start("env-1")
    opened = await client.open(msgspec.structs.replace(isolated, session="t", deadline_s=60.0))
    assert opened.failure is None and opened.worker.startswith("env-1-")


async def test_worker_tells_what_it_is(workers: Workers, client: EnvClient) -> None:
    await workers.start("env-0")
    await client.open(opening("s"))
    await until(lambda: workers.info("env-0"), lambda info: info is not None and info.detail["sessions"] == 1)
    info = await workers.info("env-0")
    assert info is not None
    assert (info.pool, info.status) == (Pool.ENV, "ready")
    assert info.detail["environments"] == sorted(BUILT_IN)


SHARED = 32
"""So many sessions and none of them on the one of two workers: that does not happen."""


async def test_timelines_are_published_per_job(workers: Workers, client: EnvClient, bus: Bus) -> None:
    await asyncio.gather(workers.start("env-0"), workers.start("env-1"))
    jobs = [f"j-{uuid.uuid4().hex[:10]}" for _ in range(2)]
    heard = {job: await messages(bus, TIMELINE, job=job, worker="*") for job in jobs}

    async def play(job: str, name: str) -> None:
        request = opening(name, "tests.samples.env_samples:Counting", turns=20)
        reply = await client.open(msgspec.structs.replace(request, job=job))
        for turn in range(20):
            assert (await client.step(*guess(reply, name, turn))).failure is None

    await asyncio.gather(*(play(job, f"{job}-{number}") for job in jobs for number in range(SHARED)))
    for name in ("env-0", "env-1"):
        workers.signal(name, signal.SIGTERM)
        assert await workers.end(name) == 0  # the last part comes before the end
    await bus.flush()
    for job in jobs:
        parts = heard[job]
        assert {(part.job, part.worker) for part in parts} == {(job, "env-0"), (job, "env-1")}
        for worker in ("env-0", "env-1"):
            own = [part for part in parts if part.worker == worker]
            assert [part.seq for part in own] == list(range(len(own)))
            segments = [segment for part in own for segment in part.segments]
            assert {(one.lane, one.kind) for one in segments} == {("env", "open"), ("env", "turn")}
            turns = [one for one in segments if one.kind == "turn"]
            assert 0 < sum(one.end - one.start for one in turns) < 60 and max(one.level for one in turns) <= SHARED
        kept = [part for _, part in await bus.history(TIMELINE, 0, 1000, job=job, worker="*")]
        assert sorted(kept, key=_by_worker) == sorted(parts, key=_by_worker)


def _by_worker(part: TimelinePart) -> tuple[str, int]:
    return part.worker, part.seq


async def test_episodes_of_a_rollout_worker_that_is_gone_are_ended(workers: Workers, bus: Bus, store: Store) -> None:
    await workers.start("env-0", OPENTINKER_WORKER_TTL_S="0.3")
    alive = WorkerInfo(id="rollout-0", incarnation="second", pool=Pool.ROLLOUT, host="h", pid=1)
    await store.beat(alive, 600.0)
    stays = EnvClient(bus, owner=owner_of("rollout-0", "second"))
    dead = EnvClient(bus, owner=owner_of("rollout-0", "first"))
    kept = await stays.open(opening("kept", deadline_s=600.0))
    lost = await dead.open(opening("lost", deadline_s=600.0))
    nobodys = await EnvClient(bus).open(opening("nobodys", deadline_s=600.0))
    await until(lambda: dead.step(*guess(lost, "lost")), lambda found: found.failure == Ending.ENV_LOST)
    assert (await stays.step(*guess(kept, "kept"))).failure is None
    assert (await stays.step(*guess(nobodys, "nobodys"))).failure is None
    await store.leave(alive)
