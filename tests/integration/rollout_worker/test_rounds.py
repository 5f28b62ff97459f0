"""Rounds from end to end: an env worker process behind NATS and the simulated engine, a WebSocket, a serving user."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from opentinker.serve.ws_server import listening
from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.spec import ToySpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, StopReason, WeightVersion
from opentinker.shared.types.env_protocol import OpenSession, SeatAction, SessionReply, StepSession
from opentinker.shared.types.trajectories import Trajectory
from tests.conftest import WAIT_S, Server
from tests.integration.rollout_worker.test_env_service import Workers
from tests.integration.rollout_worker.test_remote import Playing
from tests.integration.rollout_worker.test_served import serving
from tests.samples.round_samples import Deal, Vote
from tests.support.factories import make_spec
from tests.unit.rollout_worker.test_episode import EOS, episode

VOTE = "tests.samples.round_samples:Vote"
SEATS = 4


class Crowd(ToyEngine):
    """Answers nobody before `size` requests are open; then one after the other, in this order of arrival."""

    def __init__(self, size: int, order: int = 1) -> None:
        super().__init__(ToySpec(), eos_id=EOS, vocab_size=128, context_length=4096)
        self.version = WeightVersion(1, 0)
        self.size, self.order = size, order
        self.waiting: list[asyncio.Future[None]] = []
        self.most = 0

    async def generate(self, *args: Any, **options: Any) -> Completion:
        completion = await super().generate(*args, **options)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self.most = max(self.most, len(self.waiting))
        if len(self.waiting) == self.size:
            asyncio.create_task(self._release())  # noqa: RUF006 - it ends with the round
        await turn
        return completion

    async def _release(self) -> None:
        turns, self.waiting = self.waiting[:: self.order], []
        for turn in turns:
            turn.set_result(None)
            await asyncio.sleep(0)


@pytest.fixture
async def workers(nats_server: Server, valkey_server: Server, store: Store) -> AsyncIterator[Workers]:
    workers = Workers(nats_server, valkey_server, store)
    await workers.start("env-0")
    yield workers
    workers.close()


async def match(engine: ToyEngine, client: EnvClient, environment: str = VOTE, **config: Any) -> list[Trajectory]:
    spec = {"environment__name": environment, "environment__config": config}
    playing = episode(engine, client, rollout__max_turns=8, rollout__max_tokens_per_turn=4, rollout__seed=3, **spec)  # type: ignore[arg-type]
    return await asyncio.wait_for(playing.run(), WAIT_S)


async def test_a_round_costs_its_slowest_seat(workers: Workers, bus: Bus) -> None:
    engine = Crowd(SEATS)
    trajectories = await match(engine, EnvClient(bus), seats=SEATS, rounds=3)
    assert engine.most == SEATS  # an engine that answers only when all have asked would hang in turn order
    assert [one.seat for one in trajectories] == [f"voter_{n}" for n in range(SEATS)]
    assert all([turn.number for turn in one.turns] == [0, 1, 2] for one in trajectories)
    assert {one.ending for one in trajectories} == {Ending.ENV_DONE}
    for trajectory in trajectories:
        trajectory.check()


async def test_a_match_is_the_same_whatever_the_order_in_which_the_engine_answers(workers: Workers, bus: Bus) -> None:
    stories = []
    for order in (1, -1):
        played = await match(Crowd(SEATS, order), EnvClient(bus), seats=SEATS, rounds=3)
        stories.append([(one.seat, one.ids.tolist(), one.reward, one.metrics) for one in played])
    assert stories[0] == stories[1]


async def test_a_redelivered_round_changes_nothing(workers: Workers, bus: Bus) -> None:
    client = EnvClient(bus)
    session = uuid.uuid4().hex
    opened = await client.open(
        OpenSession(job="j", session=session, environment=VOTE, config={"seats": 2}, row=0, seed=0, deadline_s=WAIT_S)
    )
    assert opened.failure is None, opened.error
    request = acts(opened, session, 0, "a", "b")
    first = await client.step(opened.worker, request)
    second = await client.step(opened.worker, request)
    assert first == second and first.rewards == {"voter_0": {"vote": 1.0}}
    last = await client.step(opened.worker, acts(first, session, 1, "b", "b"))
    assert last.done and last.metrics == {"most": 2.0}


async def test_half_a_round_is_refused(workers: Workers, bus: Bus) -> None:
    client = EnvClient(bus)
    session = uuid.uuid4().hex
    opened = await client.open(
        OpenSession(job="j", session=session, environment=VOTE, config={"seats": 2}, row=0, seed=0, deadline_s=WAIT_S)
    )
    alone = StepSession(session=session, turn=0, seat="voter_0", text="a", stop=StopReason.EOS)
    refused = await client.step(opened.worker, alone)
    assert refused.failure == Ending.ENV_ERROR and "a round of the seats 'voter_0', 'voter_1'" in refused.error


async def test_bots_of_a_round_ask_no_engine(workers: Workers, bus: Bus) -> None:
    client = EnvClient(bus)
    session = uuid.uuid4().hex
    opened = await client.open(
        OpenSession(
            job="j", session=session, environment="matching_pennies", config={}, row=0, seed=0, deadline_s=WAIT_S,
            bots={"odd": "heads"},
        )
    )  # fmt: skip
    assert [prompt.seat for prompt in opened.round] == ["even"]
    last = await client.step(opened.worker, acts(opened, session, 0, "h"))
    assert last.done and last.rewards == {"even": {"outcome": 1.0}, "odd": {"outcome": -1.0}}


async def test_a_child_process_plays_rounds(workers: Workers, bus: Bus) -> None:
    client, session = EnvClient(bus), uuid.uuid4().hex
    opened = await client.open(
        OpenSession(
            job="j", session=session, environment="pettingzoo", row=0, seed=0, deadline_s=WAIT_S,
            config={"id": "classic/rps_v2", "api": "parallel", "kwargs": {"max_cycles": 1}},
        )
    )  # fmt: skip
    assert [prompt.seat for prompt in opened.round] == ["player_0", "player_1"], opened.error
    last = await client.step(opened.worker, acts(opened, session, 0, "rock", "paper"))
    assert last.done and last.rewards == {"player_0": {"reward": -1.0}, "player_1": {"reward": 1.0}}


async def test_rounds_travel_over_a_websocket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(LOOPBACK))
    async with listening(Deal, "127.0.0.1", 0, 8) as url:
        playing = Playing(url)
        opened = await playing.open()
        assert (opened.seat, opened.round, opened.failure) == ("dealer", [], None)
        session = playing.request.session
        dealt = await playing.sessions.step(acts(opened, session, 0, "0"))
        assert [prompt.messages[0].text for prompt in dealt.round] == ["left, guess", "right, guess"]
        last = await playing.sessions.step(acts(dealt, session, 1, "0", "1"))
        assert last.done and last.rewards == {"left": {"guess": 1.0}, "right": {"guess": 0.0}}
        await playing.close()


async def test_a_serving_user_plays_rounds(url: str, bus: Bus, store: Store) -> None:
    spec = make_spec().model_dump(mode="json")
    job = await store.create_job(id="j-" + uuid.uuid4().hex[:10], spec=spec, tenant="default")
    async with serving(Vote, url):
        client, session = EnvClient(bus, ask_s=1.0, gone_s=0.3), uuid.uuid4().hex
        opened = await client.open(
            OpenSession(
                job=job, session=session, environment="served:count", config={"seats": 3, "rounds": 1}, row=0, seed=0,
                deadline_s=WAIT_S,
            )
        )  # fmt: skip
        assert [prompt.seat for prompt in opened.round] == ["voter_0", "voter_1", "voter_2"]
        last = await client.step(opened.worker, acts(opened, session, 0, "a", "b", "b"))
        assert last.done and sorted(last.rewards) == ["voter_1", "voter_2"]


def acts(asked: SessionReply, session: str, turn: int, *texts: str) -> StepSession:
    actions = [
        SeatAction(seat=prompt.seat, text=text, stop=StopReason.EOS)
        for prompt, text in zip(asked.prompts, texts, strict=True)
    ]
    return asked.step(session, turn, actions)
