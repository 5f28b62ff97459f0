"""Rounds that are played elsewhere: behind a WebSocket, and by a serving user."""

from __future__ import annotations

import uuid

import pytest

from opentinker.serve.ws_server import listening
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, SeatAction, SessionReply, StepSession
from tests.conftest import WAIT_S
from tests.integration.rollout_worker.remote.remote_sessions import Playing
from tests.integration.rollout_worker.served.served_episodes import serving
from tests.samples.seat_samples import Deal, Vote
from tests.support.factories import make_spec


@pytest.mark.usefixtures("loopback_allowed")
async def test_rounds_travel_over_a_websocket() -> None:
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
