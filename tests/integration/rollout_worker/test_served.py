"""Environments that their users serve: a process behind a WebSocket, seen as rollout workers see it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import msgspec
import pytest

from opentinker.client import AsyncClient
from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.envs.game import AbstractGame, StepResult
from opentinker.envs.runtime.in_process_server import InProcessServer
from opentinker.sdk.http import ApiError
from opentinker.serve.ws_client import AsyncServing, serve_environment
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.shared.messaging.bus import Bus, NoReply, NoResponders
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.messaging.subjects import SERVED_CHECK
from opentinker.shared.messaging.websocket_frames import FRAME_BYTES, AnswerFrame, CallFrame, Hello, Welcome
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending, Message, StopReason
from opentinker.shared.types.env_protocol import EnvCheck, OpenSession, SessionReply, StepSession
from tests.conftest import NewContext, until
from tests.samples.env_samples import Shuffled
from tests.samples.slow_imports import Gate, alive_importers
from tests.support.api import OPERATOR, bearing
from tests.support.factories import make_spec
from tests.support.http_server import http_server
from tests.support.playing import opening, step
from tests.support.scheduling import scheduler

DEADLINE_S = 20.0


class Counting(Environment):
    """Counts the turns that were really played; each waits for its gate."""

    class Config(EnvironmentConfig):
        limit: int = 1000

    config: Config
    gate: ClassVar[asyncio.Event]
    played: ClassVar[list[int]]

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(f"row {row} seed {seed}")]

    async def step(self, action: Action) -> Step:
        await self.gate.wait()
        self.played.append(action.turn)
        return Step(
            messages=[user(f"turn {action.turn}: {action.text}")], reward=1.0, done=action.turn + 1 >= self.config.limit
        )


@pytest.fixture
def environment() -> type[Counting]:
    """One of the test's own, with its gate open."""
    gate = asyncio.Event()
    gate.set()
    return type("Counting", (Counting,), {"gate": gate, "played": []})


@pytest.fixture
async def job(store: Store) -> str:
    spec = make_spec().model_dump(mode="json")
    return await store.create_job(id="j-" + uuid.uuid4().hex[:10], spec=spec, tenant="default")


class Episode:
    """One session, played as a rollout worker plays it."""

    def __init__(self, bus: Bus, job: str, name: str, session: str = "") -> None:
        self.client = EnvClient(bus, ask_s=1.0, gone_s=0.3)
        self.job, self.name, self.session = job, name, session or uuid.uuid4().hex
        self.worker = ""
        self.importing: Callable[[], AbstractContextManager[object]] = nullcontext

    async def open(self, deadline_s: float = DEADLINE_S, **config: Any) -> SessionReply:
        request = OpenSession(
            job=self.job,
            session=self.session,
            environment=f"served:{self.name}",
            config=config,
            row=3,
            seed=4,
            deadline_s=deadline_s,
        )
        reply = await self.client.open(request, self.importing)
        self.worker = reply.worker
        return reply

    async def begun(self) -> Episode:
        await self.open()
        return self

    async def step(self, turn: int, text: str = "x") -> SessionReply:
        request = StepSession(session=self.session, turn=turn, text=text, stop=StopReason.EOS)
        return await self.client.step(self.worker, request)

    async def close(self) -> None:
        await self.client.close(worker=self.worker, session=self.session)


def serving(environment: type[Environment] | type[AbstractGame] | str, url: str, **options: Any) -> AsyncServing:
    return AsyncServing(environment, name="count", url=url, on_wait=lambda _: None, **{"drain_s": 0.0} | options)


async def test_the_serving_process_plays(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url) as served:
        assert served.environment == "served:count"
        episode = Episode(bus, job, "count")
        reply = await episode.open(limit=2)
        assert reply.failure is None and reply.messages == [user("row 3 seed 4")]
        assert reply.worker.startswith("served-")
        first, again = await episode.step(0, "a"), await episode.step(0, "a")
        assert first == again and first.messages == [user("turn 0: a")] and first.reward == 1.0
        last = await episode.step(1, "b")
        assert last.done and environment.played == [0, 1]
        await episode.close()
        await until(lambda: served.active == 0)


async def test_import_in_the_serving_process_takes_no_time_of_the_episode(
    url: str, bus: Bus, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    clocks: list[str] = []

    @contextmanager
    def stopped() -> Iterator[None]:
        clocks.append("stopped")
        yield
        clocks.append("runs")

    async with serving(gate.environment, url):
        episode = Episode(bus, job, "count")
        episode.importing = stopped
        began, deadline_s = time.monotonic(), 3.0
        opened = asyncio.create_task(episode.open(deadline_s))
        await until(lambda: time.monotonic() > began + deadline_s)
        assert clocks == ["stopped"] and not opened.done()
        gate.file.touch()
        reply = await opened
        assert reply.failure is None, reply.error
        assert clocks == ["stopped", "runs"]
        assert (await episode.step(0)).reward == 1.0
        await episode.close()


async def test_import_in_the_serving_process_ends_at_the_operators_deadline(
    bus: Bus, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_context: NewContext
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    limited = new_context(env_import_timeout_s=2.0)
    async with limited as ctx, scheduler(ctx) as url, serving(gate.environment, url) as served:
        late = await Episode(bus, job, "count").open()
        assert late.failure == Ending.ENV_TIMEOUT
        assert "was not imported within 2 s (operator setting env_import_timeout_s)" in late.error
        await until(lambda: served.active == 0 and not alive_importers(gate))


async def test_who_serves_is_listed_and_seen_among_the_workers(url: str, environment: type[Counting]) -> None:
    async with aiohttp.ClientSession(headers=bearing()) as http:

        async def listed() -> list[Any]:
            async with http.get(f"{url}/v1/served") as response:
                found: list[Any] = (await response.json())["served"]
                return found

        async with serving(environment, url, concurrency=7), serving(environment, url, concurrency=8):
            await until(
                listed,
                lambda found: (
                    [(e["environment"], e["processes"], e["capacity"]) for e in found] == [("served:count", 2, 15)]
                ),
            )
        await until(listed, lambda found: found == [])


async def test_two_processes_share_the_load(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url, concurrency=2) as one:
        episodes = [Episode(bus, job, "count") for _ in range(4)]
        first = [await episode.open() for episode in episodes[:2]]
        waiting = [asyncio.create_task(episode.open()) for episode in episodes[2:]]
        full = await Episode(bus, job, "count").open(deadline_s=3.0)
        assert full.failure == Ending.ENV_LOST and "full" in full.error
        async with serving(environment, url, concurrency=2) as two:
            second = await asyncio.gather(*waiting)
            assert {reply.worker for reply in first} != {reply.worker for reply in second}
            assert [reply.failure for reply in [*first, *second]] == [None] * 4
            assert (one.active, two.active) == (2, 2)
            for episode in episodes:
                await episode.close()


async def test_a_session_survives_a_disconnect(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        await episode.step(0)
        environment.gate.clear()
        step = asyncio.create_task(episode.step(1))
        await until(lambda: served._stage.sessions._sessions[episode.session].turn == 1)
        cut(served)
        await until(lambda: served.connections == 2)
        environment.gate.set()
        assert (await step).messages == [user("turn 1: x")]
        assert (await episode.step(2)).messages == [user("turn 2: x")]
        assert environment.played == [0, 1, 2]


def cut(served: AsyncServing) -> None:
    """The cable, so to speak."""
    assert served._socket is not None
    transport = served._socket._response.connection.transport  # type: ignore[union-attr]
    assert transport is not None
    transport.abort()


async def test_sessions_survive_the_scheduler(ctx: Context, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with AsyncExitStack() as stack:
        async with scheduler(ctx) as url:
            served = await stack.enter_async_context(serving(environment, url))
            episode = await Episode(bus, job, "count").begun()
            await episode.step(0)
        await until(lambda: not served.connected.is_set())
        step = asyncio.create_task(episode.step(1))
        ctx.settings = ctx.settings.model_copy(update={"http_port": int(url.rpartition(":")[2])})
        async with scheduler(ctx):
            assert (await step).messages == [user("turn 1: x")]
            assert environment.played == [0, 1]
            await served.close(drain_s=0.0)


async def test_either_of_two_schedulers_may_hold_the_connection(
    ctx: Context, url: str, bus: Bus, job: str, environment: type[Counting], new_context: NewContext
) -> None:
    async with new_context("scheduler-1") as other, scheduler(other) as second, serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        await episode.step(0)
        served._http.url = second
        cut(served)
        await until(lambda: served.connections == 2)
        for turn in range(1, 4):
            assert (await episode.step(turn)).failure is None
        assert environment.played == [0, 1, 2, 3]
        cut(served)
        served._http.url = url
        await until(lambda: served.connections == 3)
        assert (await episode.step(4)).failure is None


async def test_a_goodbye_ends_all_sessions(url: str, bus: Bus, job: str, environment: type[Counting]) -> None:
    async with serving(environment, url, drain_s=0.0) as served:
        episode = await Episode(bus, job, "count").begun()
        environment.gate.clear()
        step = asyncio.create_task(episode.step(0))
        await until(lambda: served._stage.sessions._sessions[episode.session].turn == 0)
    assert (await step).failure in (Ending.ENV_LOST, Ending.ENV_ERROR)


async def test_a_process_that_stays_away_loses_its_sessions(
    ctx: Context, bus: Bus, job: str, environment: type[Counting]
) -> None:
    async with scheduler(ctx, Gateway(ctx, away_s=0.3)) as url, serving(environment, url) as served:
        episode = await Episode(bus, job, "count").begun()
        served._stopping = True
        cut(served)
        reply = await episode.step(0)
        assert reply.failure == Ending.ENV_LOST and "away" in reply.error


# --- refusals -------------------------------------------------------------------------------------------------------


async def checked(bus: Bus, within_s: float = 10.0, tenant: str = "default") -> list[Any]:
    check = EnvCheck(name="served:count", config={})
    keys = {"tenant": tenant, "environment": "served:count"}
    return (await bus.request(SERVED_CHECK, check, within_s, **keys)).errors


async def _nobody_serves(bus: Bus) -> bool:
    try:
        await checked(bus, 0.2)
    except NoResponders:
        return True
    except NoReply:
        pass
    return False


class Raw:
    """A client that sends what it likes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, noun: Any) -> None:
        await self.socket.send_bytes(codec.encode(noun))

    async def join(self) -> str:
        """The address that it was given."""
        await self.send(HELLO)
        return str((await self.next(Welcome)).worker)

    async def closed(self) -> tuple[int, str]:
        message = await self.socket.receive(10.0)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return int(message.data or 0), str(message.extra)

    async def next(self, kind: type[Any]) -> Any:
        return codec.decode(kind, await self.socket.receive_bytes(timeout=10.0))

    async def answer(self, reply: Any) -> CallFrame:
        """Of the next call."""
        call: CallFrame = await self.next(CallFrame)
        await self.send(AnswerFrame(call.serial, msgspec.Raw(codec.encode(reply))))
        return call


@asynccontextmanager
async def raw(url: str, name: str = "count", key: str = OPERATOR, **options: Any) -> AsyncIterator[Raw]:
    async with (
        aiohttp.ClientSession(headers=bearing(key)) as http,
        http.ws_connect(f"{url}/v1/served/{name}", **options) as socket,
    ):
        yield Raw(socket)


HELLO = Hello(process="p" * 32, capacity=4, environment="raw")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (msgspec.structs.replace(HELLO, protocol=99), "protocol 99"),
        (msgspec.structs.replace(HELLO, process="short"), "process"),
        (msgspec.structs.replace(HELLO, capacity=0), "capacity"),
        (msgspec.structs.replace(HELLO, environment="e" * 300), "200 characters"),
        ({"nothing": 1}, "not a Hello"),
    ],
)
async def test_a_wrong_hello_is_refused_with_a_reason(url: str, hello: Any, reason: str) -> None:
    async with raw(url) as client:
        await client.send(hello)
        code, said = await client.closed()
        assert code == aiohttp.WSCloseCode.POLICY_VIOLATION and reason in said


async def test_bad_frames_end_the_connection_and_oversized_ones_too(url: str) -> None:
    for data, code in ((b"\xc1", 1008), (b"x" * (FRAME_BYTES + 1), 1009)):
        async with raw(url) as client:
            await client.join()
            await client.socket.send_bytes(data)
            assert (await client.closed())[0] == code
    async with raw(url) as client:
        await client.join()
        await client.socket.send_str("text")
        assert (await client.closed())[0] == 1008


async def test_web_pages_plain_requests_and_odd_names_are_refused(url: str) -> None:
    path = f"{url}/v1/served"
    async with aiohttp.ClientSession(headers=bearing()) as http:
        for name, headers, status in (("x", {}, 426), ("x", {"Origin": "http://evil"}, 403), ("-x", {}, 422)):
            async with http.get(f"{path}/{name}", headers=headers) as response:
                assert response.status == status and "detail" in await response.json()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (SessionReply(worker="", messages=[user("x")], reward=float("nan")), "finite"),
        (SessionReply(worker="", messages=[user("x")], metrics={"m": float("inf")}), "finite"),
        (SessionReply(worker="", messages=[user("x" * 300_000)]), "bytes of messages"),
        (SessionReply(worker="", messages=[user("x")], components={str(n): 1.0 for n in range(100)}), "named numbers"),
        ({"worker": 5}, "not a SessionReply"),
    ],
)
async def test_what_a_process_answers_is_checked(url: str, bus: Bus, job: str, reply: Any, reason: str) -> None:
    async with raw(url) as client:
        await client.join()
        opening = asyncio.create_task(Episode(bus, job, "count").open())
        await client.answer(reply)
        found = await opening
        assert found.failure == Ending.ENV_BAD_REPLY and reason in found.error


async def test_a_process_speaks_for_its_own_address_alone(url: str, bus: Bus, job: str) -> None:
    async with raw(url) as client:
        own = await client.join()
        opening = asyncio.create_task(Episode(bus, job, "count").open())
        await client.answer(SessionReply(worker="env-0", messages=[user("x")], failure=None))
        assert (await opening).worker == own


async def test_another_tenants_job_is_not_played(url: str, bus: Bus, store: Store, environment: type[Counting]) -> None:
    spec = make_spec().model_dump(mode="json")
    other = await store.create_job(id="j-0000000000", spec=spec, tenant="somebody-else")
    async with serving(environment, url):
        reply = await Episode(bus, other, "count").open()
        assert reply.failure == Ending.ENV_ERROR and "tenant" in reply.error


async def test_a_half_open_connection_is_noticed(ctx: Context, bus: Bus, job: str) -> None:
    gateway = Gateway(ctx, away_s=0.1, heartbeat_s=0.1)
    async with scheduler(ctx, gateway) as url, raw(url, autoping=False) as client:
        await client.join()
        episode = Episode(bus, job, "count")
        opening = asyncio.create_task(episode.open())
        await client.next(CallFrame)
        assert (await client.socket.receive(10.0)).type is aiohttp.WSMsgType.PING
        opening.cancel()
        await until(lambda: _nobody_serves(bus))


# --- from a thread --------------------------------------------------------------------------------------------------


class Blocking(Environment):
    """Blocks its thread until its barrier is whole: four at once, or none."""

    blocking = True
    together = threading.Barrier(4)

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user("wait")]

    async def step(self, action: Action) -> Step:
        self.together.wait(5.0)
        return Step(reward=1.0, done=True)


async def drawn(rows: list[int]) -> list[list[str]]:
    """Return the draws of each session; they are played side by side."""
    stage = InProcessServer(Shuffled, 4)

    async def one(row: int) -> list[str]:
        session = f"row {row}"
        replies: list[SessionReply] = [await stage.play("open", opening("", session, row=row, seed=4))]
        for turn in range(2):
            replies.append(await stage.play("step", step(turn, session=session)))
        return [reply.messages[0].text for reply in replies]

    try:
        return await asyncio.gather(*map(one, rows))
    finally:
        await stage.close(0.0)


async def test_sessions_in_threads_draw_what_each_would_draw_alone() -> None:
    alone = [*await drawn([1]), *await drawn([2])]
    assert alone[0] != alone[1]
    assert await drawn([1, 2]) == alone


async def test_a_blocking_class_is_served_from_a_background_thread(url: str, bus: Bus, job: str) -> None:
    served = await asyncio.to_thread(lambda: serve_environment(Blocking, name="block", url=url))
    try:
        assert served.connected and served.environment == "served:block"
        episodes = [Episode(bus, job, "block") for _ in range(4)]
        assert [(await episode.open()).failure for episode in episodes] == [None] * 4
        replies = await asyncio.gather(*(episode.step(0) for episode in episodes))
        assert [reply.done for reply in replies] == [True] * 4
    finally:
        await asyncio.to_thread(served.close)
    assert not served._thread.is_running


async def test_a_server_that_refuses_is_an_error_at_once() -> None:
    async def no(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(status=401)

    async with http_server(aiohttp.web.get("/{any:.*}", no)) as url:
        with pytest.raises(ApiError, match="OPENTINKER_API_KEY"):
            await asyncio.to_thread(lambda: serve_environment(Blocking, name="x", url=url))


async def test_blocking_modules_get_children(url: str, bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    async with serving("tests.samples.env_samples:Blocking", url, concurrency=2):
        episodes = [Episode(bus, job, "count") for _ in range(2)]
        processes = {(await episode.open()).messages[0].text for episode in episodes}
        assert len(processes) == 2 and str(os.getpid()) not in processes
        assert (await episodes[0].step(0)).failure is None
        crashed = Episode(bus, job, "count")
        await episodes[1].close()
        await crashed.open(how="crash")
        reply = await crashed.step(0)
        assert reply.failure == Ending.ENV_ERROR and "exit status 7" in reply.error


async def test_the_key_travels_in_the_header_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, environment: type[Counting], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, str | None]] = []

    async def look(request: aiohttp.web.Request) -> aiohttp.web.Response:
        asked.append((request.path_qs, request.headers.get("Authorization")))
        return aiohttp.web.Response(status=403)

    monkeypatch.setenv("OPENTINKER_API_KEY", "not-to-be-seen")
    async with http_server(aiohttp.web.get("/{any:.*}", look)) as url:
        with pytest.raises(ApiError) as refused:
            async with serving(environment, url):
                pass
    assert asked == [("/v1/served/count", "Bearer not-to-be-seen")]
    assert "not-to-be-seen" not in str(refused.value) + caplog.text


async def test_submission_asks_who_serves_it(ctx: Context, url: str, environment: type[Counting]) -> None:
    spec = make_spec(environment={"name": "served:count", "config": {"limit": "no number"}}).model_dump(mode="json")
    async with AsyncClient(url) as client:
        with pytest.raises(ApiError, match="opentinker env serve module:Class --name count"):
            await client.submit(spec)
        async with serving(environment, url):
            with pytest.raises(ApiError, match=r"environment\.config\.limit"):
                await client.submit(spec)
            record = await client.submit({**spec, "environment": {"name": "served:count"}})
            assert record["state"] == "queued"
            await until(
                lambda: ctx.store.job(record["id"]),
                lambda job: job.waiting_for and "served" not in job.waiting_for and "env worker" not in job.waiting_for,
            )  # nobody to serve its environment; it lacks workers still
        served = "a process that serves served:count"
        await until(lambda: ctx.store.job(record["id"]), lambda job: served in job.waiting_for)


class Draw(AbstractGame):
    """Draws from the global random numbers, slowly: whoever else draws meanwhile would change what it sees."""

    def reset(self, **_: Any) -> str:
        numbers = []
        for _turn in range(3):
            numbers.append(random.randint(0, 999))
            time.sleep(0.002)
        return str(numbers)

    def step(self, action: str) -> StepResult:
        return StepResult(observation="", reward=1.0, done=True, info={})

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return ""


async def test_the_episodes_of_a_group_of_a_game_begin_alike_in_threads_too(url: str, bus: Bus, job: str) -> None:
    async with serving(Draw, url):
        opened = await asyncio.gather(*(Episode(bus, job, "count").open() for _ in range(6)))
    assert [reply.failure for reply in opened] == [None] * 6
    assert len({reply.messages[-1].text for reply in opened}) == 1
