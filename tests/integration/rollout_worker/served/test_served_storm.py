"""Processes that serve an environment come, break off and come again in any order: what is left of them afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest

from opentinker.envs.base import user
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.shared.messaging.bus import Bus, NoReply
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.messaging.websocket_frames import GOODBYE, CallFrame, Hello, Welcome
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.env_protocol import EnvCheckReply, OpenSession, SessionReply
from tests.conftest import soon, until
from tests.integration.rollout_worker.served.served_episodes import HELLO, Raw, checked, raw
from tests.support.api import new_key_of
from tests.support.factories import make_spec
from tests.support.scheduling import scheduler

PROCESSES = [msgspec.structs.replace(HELLO, process=letter * 32) for letter in "abcd"]


@pytest.fixture
async def made(ctx: Context) -> AsyncIterator[tuple[str, Gateway]]:
    """The URL of a scheduler, and its gateway; who is away is soon given up."""
    gateway = Gateway(ctx, away_s=0.1)
    async with scheduler(ctx, gateway) as url:
        yield url, gateway


def left(gateway: Gateway) -> list[str]:
    """Return the subscriptions of the scheduler for serving processes, and the processes that it knows."""
    subjects = [sub.subject for sub in gateway.ctx.bus.nc._subs.values()]
    mine = [subject for subject in subjects if subject.startswith(("env.served.", "env.step.", "env.close."))]
    return [*mine, *gateway._served]


def abort(client: Raw) -> None:
    """The cable, so to speak; a newer connection of the same process may have taken it away already."""
    connection = client.socket._response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


async def come_and_go(url: str, hello: Hello, dice: random.Random) -> None:
    """One connection, from a beginning to some end."""
    how = dice.choice(["no word", "drop after hello", "drop after welcome", "drop later", "close", "goodbye"])
    async with raw(url) as client:
        if how == "no word":
            return abort(client)
        await client.send(hello)
        if how == "drop after hello":
            return abort(client)
        message = await client.socket.receive(10.0)
        if message.type is not aiohttp.WSMsgType.BINARY:  # a newer connection of the same process has come meanwhile
            return None
        if how == "drop after welcome":
            return abort(client)
        for _ in range(dice.randrange(20)):
            await asyncio.sleep(0)
        if how == "drop later":
            return abort(client)
        await client.socket.close(code=GOODBYE if how == "goodbye" else 1000)


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_connections_leaves_nothing(made: tuple[str, Gateway], bus: Bus, seed: int) -> None:
    url, gateway = made

    async def storm(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        for _ in range(12):
            await come_and_go(url, dice.choice(PROCESSES), dice)

    await soon(asyncio.gather(*(storm(number) for number in range(6))))
    for hello in PROCESSES:
        async with raw(url) as client:
            await client.send(hello)
            assert (await client.next(Welcome)).worker in gateway._served
            asked = asyncio.create_task(answered(bus))
            assert (await client.answer(EnvCheckReply(errors=[]))).verb == "check"
            assert await soon(asked) == []
            await client.socket.close(code=GOODBYE)
    await until(lambda: left(gateway) == [])


async def answered(bus: Bus) -> list[object]:
    while True:
        try:
            return await checked(bus, 5.0)
        except NoReply:
            await asyncio.sleep(0.01)


async def test_who_drops_right_after_its_hello_is_forgotten(made: tuple[str, Gateway]) -> None:
    url, gateway = made
    for number in range(10):
        async with raw(url) as client:
            await client.send(msgspec.structs.replace(HELLO, process=f"{number:032}"))
            abort(client)
    async with raw(url) as client:
        await client.send(HELLO)
        await client.next(Welcome)
        await client.socket.close(code=GOODBYE)
    await until(lambda: left(gateway) == [])


async def test_a_reconnecting_process_is_used(made: tuple[str, Gateway], bus: Bus) -> None:
    url, gateway = made
    async with AsyncExitStack() as stack:
        for _ in range(20):
            old = await stack.enter_async_context(raw(url))
            await old.send(HELLO)
            await old.next(Welcome)
            new = await stack.enter_async_context(raw(url))
            sending = asyncio.create_task(new.send(HELLO))
            abort(old)
            await sending
            await new.next(Welcome)
            asked = asyncio.create_task(checked(bus))
            assert (await new.answer(EnvCheckReply(errors=[]))).verb == "check"
            assert await soon(asked) == []
            await new.socket.close(code=GOODBYE)
    await until(lambda: left(gateway) == [])


async def test_excess_processes_are_refused(made: tuple[str, Gateway]) -> None:
    url, gateway = made
    gateway.max_known = 1
    async with raw(url) as first, raw(url) as second:
        await first.send(PROCESSES[0])
        await first.next(Welcome)
        await second.send(PROCESSES[1])
        assert (await second.closed())[0] == aiohttp.WSCloseCode.TRY_AGAIN_LATER
        assert len(gateway._served) == 1


async def test_a_name_is_its_tenant_s_own(made: tuple[str, Gateway], bus: Bus, store: Store) -> None:
    """Two tenants serve the same name; each one's jobs and checks reach its own process alone."""

    url, _ = made
    async with AsyncExitStack() as stack:
        clients: dict[str, Raw] = {}
        for hello, tenant in zip(PROCESSES[:2], ("red", "blue"), strict=True):
            clients[tenant] = await stack.enter_async_context(raw(url, key=await new_key_of(store, tenant)))
            await clients[tenant].send(hello)
            await clients[tenant].next(Welcome)
        for tenant in ("red", "blue") * 4:
            asked = asyncio.create_task(checked(bus, tenant=tenant))
            await clients[tenant].answer(EnvCheckReply(errors=[{"field": "f", "value": None, "problem": tenant}]))
            assert [mistake["problem"] for mistake in await asked] == [tenant]
        for tenant in ("red", "blue") * 4:
            spec = make_spec().model_dump(mode="json")
            job = await store.create_job(id=f"j-{random.randbytes(5).hex()}", spec=spec, tenant=tenant)
            client = EnvClient(bus, tenant=tenant)
            opening = client.open(
                OpenSession(job=job, session=job, environment="served:count", config={}, row=0, seed=0, deadline_s=20.0)
            )
            opened = asyncio.create_task(opening)
            call: CallFrame = await clients[tenant].answer(SessionReply(worker="", messages=[user(tenant)]))
            assert msgspec.msgpack.decode(call.body, type=OpenSession).job == job
            assert (await opened).messages == [user(tenant)]
