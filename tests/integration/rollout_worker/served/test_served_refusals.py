"""What the gateway of served environments refuses: hellos, frames, answers, jobs of others, half-open connections."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from opentinker.envs.base import user
from opentinker.serve import ws_client
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.shared.messaging.bus import Bus, NoReply, NoResponders
from opentinker.shared.messaging.websocket_frames import FRAME_BYTES, CallFrame
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import SessionReply
from tests.conftest import until
from tests.integration.rollout_worker.served.served_episodes import HELLO, Counting, Episode, checked, raw, serving
from tests.support.api import bearing
from tests.support.factories import make_spec
from tests.support.scheduling import scheduler


async def _nobody_serves(bus: Bus) -> bool:
    try:
        await checked(bus, 0.2)
    except NoResponders:
        return True
    except NoReply:
        pass
    return False


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


def test_who_may_not_serve_is_told_the_scope() -> None:
    said = ws_client._refused("ws://here", 403)
    assert said == "ws://here answered 403: the key lacks the scope environments:serve"
    assert ws_client._refused("ws://here", 500).endswith("see its log")
