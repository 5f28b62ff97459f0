"""Whoever hears a job live is cut off when the key or the job is over: real nats-servers, real connections."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from opentinker.local.embedded import nats_binary
from opentinker.local.server_users import Access, WebSocket
from opentinker.services.scheduler.streams.disconnect import StreamDisconnector
from opentinker.services.scheduler.streams.nats_auth import NatsAuthCallout
from opentinker.shared.messaging.permissions import SYSTEM
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import digest_of, new_key
from opentinker.shared.state import stream_connections
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.store import Store
from opentinker.shared.state.stream_connections import ConnectionGroup, StreamConnection, StreamConnections
from opentinker.shared.state.stream_credentials import StreamCredentialStore
from tests.conftest import Server, free_port, nats_conf, until
from tests.support.api import Http, id_of, new_key_of
from tests.support.browsing import Browser, browser
from tests.support.scheduling import new_job, running, scheduler
from tests.support.streams import Guarded, Listener, comes_in, connected, given, guarded_context, guarded_nats, job_of


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_nats(tmp_path_factory.mktemp("guarded")) as guarded:
        yield guarded


@pytest.fixture
async def ctx(guarded: Guarded, valkey_server: Server, store: Store, tmp_path: Path) -> AsyncIterator[Context]:
    async with guarded_context(guarded, valkey_server, store, tmp_path / "data") as ctx:
        yield ctx


@asynccontextmanager
async def listening(token: str, guarded: Guarded) -> AsyncIterator[Listener]:
    async with connected(guarded.websocket, token=token) as listener:
        await listener.said()
        yield listener


Over = Callable[[Store, str, str], Awaitable[object]]


async def revoked(store: Store, key: str, job: str) -> None:
    await KeyStore(store.redis).revoke(id_of(key), now=time.time())


async def rotated_away(store: Store, key: str, job: str) -> None:
    await KeyStore(store.redis).rotate(id_of(key), new_key("local", id_of(key)), now=time.time(), grace_s=0.0)


async def its_end_brought_forward(store: Store, key: str, job: str) -> None:
    """The server that let it in was told another time."""
    await store.redis.hset(f"key:{id_of(key)}", "expires", time.time() - 1.0)


async def demoted(store: Store, key: str, job: str) -> None:
    await store.redis.hset(f"key:{id_of(key)}", "scopes", "checkpoints:read")


async def moved_to_another_tenant(store: Store, key: str, job: str) -> None:
    await store.redis.hset(f"key:{id_of(key)}", "tenant", "blue")


async def its_job_deleted(store: Store, key: str, job: str) -> None:
    await store.redis.delete(f"job:{job}")


ENDS: tuple[Over, ...] = (
    *(revoked, rotated_away, its_end_brought_forward, demoted, moved_to_another_tenant, its_job_deleted),
)


async def test_connections_end_with_the_session_that_asked_for_them(api: Http, store: Store, guarded: Guarded) -> None:
    """Another session of the same key, and the key itself, keep theirs."""
    key = await new_key_of(store, "red")
    async with browser(api.url, key) as page, browser(api.url, key) as other, AsyncExitStack() as stack:
        job = await job_of(api, key)

        async def opened(asker: Browser) -> Listener:
            status, credential = await asker.asks("POST", f"/v1/jobs/{job}/stream-credentials")
            assert status == 201, credential
            return await stack.enter_async_context(listening(credential["token"], guarded))

        ends, stays = await opened(page), await opened(other)
        stays_too = await stack.enter_async_context(listening(str((await given(api, job, key))["token"]), guarded))
        assert (await page.asks("DELETE", "/v1/session"))[0] == 200
        await until(lambda: ends.closed)
        assert not stays.closed and not stays_too.closed


async def test_connections_end_with_their_key_or_job(api: Http, store: Store, guarded: Guarded) -> None:
    """Each takes about a second at most; here it is waited for, and what stays is asked after all others have gone."""
    took: dict[str, float] = {}
    async with AsyncExitStack() as stack:

        async def opened(key: str) -> tuple[str, str, list[Listener]]:
            job = await job_of(api, key)
            token = str((await given(api, job, key))["token"])
            both = [await stack.enter_async_context(listening(token, guarded)) for _ in range(2)]
            return job, token, both

        stays = [await opened(await new_key_of(store, "red")) for _ in range(2)]
        for end in ENDS:
            key = await new_key_of(store, "red")
            job, token, both = await opened(key)
            began = time.monotonic()
            await end(store, key, job)
            for listener in both:
                await until(functools.partial(getattr, listener, "closed"))
            took[end.__name__] = time.monotonic() - began
            assert not await comes_in(guarded.websocket, token=token), end.__name__
        for _, token, both in stays:
            for listener in both:
                await listener.said()
                assert not listener.closed
            assert await comes_in(guarded.websocket, token=token)
    print("\nclosed after s:", {name: round(seconds, 2) for name, seconds in took.items()})


async def test_rotation_closes_old_connections_after_grace(api: Http, store: Store, guarded: Guarded) -> None:
    key = await new_key_of(store, "red")
    job = await job_of(api, key)
    new = new_key("local", id_of(key))
    token = str((await given(api, job, key))["token"])
    async with listening(token, guarded) as old:
        await KeyStore(store.redis).rotate(id_of(key), new, now=time.time(), grace_s=3600.0)
        async with listening(str((await given(api, job, new))["token"]), guarded) as newer:
            assert await comes_in(guarded.websocket, token=token)
            await store.redis.hset(f"key:{id_of(key)}", "old_until", time.time())
            await until(lambda: old.closed)
            await newer.said()
            assert not newer.closed and not await comes_in(guarded.websocket, token=token)


async def test_key_revoked_without_a_scheduler_is_cut_off(ctx: Context, store: Store, guarded: Guarded) -> None:
    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        async with scheduler(ctx) as url:
            key, api = await new_key_of(store, "red"), Http(session, url)
            token = str((await given(api, await job_of(api, key), key))["token"])
            listener = await stack.enter_async_context(listening(token, guarded))
        await revoked(store, key, "")
        await listener.said()
        assert not listener.closed
        async with scheduler(ctx):
            await until(lambda: listener.closed)
            connections = StreamConnections(store.redis)  # its server says that it has it no more
            await until(lambda: connections.groups(time.time()), lambda found: found == [])


async def test_scheduler_and_operator_are_no_users_of_the_servers_account(ctx: Context, guarded: Guarded) -> None:
    """KICK is SYSTEM's alone; and that one may say and hear nothing else."""
    async with connected(guarded.server.url, user=SYSTEM, password=guarded.access.password("nats", "scheduler")) as it:
        for subject in ("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.X.RELOAD", "metric.j.t", "$JS.API.INFO", "x"):
            await it.nc.publish(subject, b"")
        for subject in (">", "$SYS.>", "$SYS.ACCOUNT.>", "_INBOX.>", "$SYS.REQ.SERVER.*.KICK"):
            await it.nc.subscribe(subject)
        await it.said()
        assert len(it.refused) == 10, it.refused
    assert not await comes_in(guarded.websocket, user=SYSTEM, password=guarded.access.password("nats", "scheduler"))
    assert not await comes_in(guarded.server.url, user=SYSTEM, password="x" * 64)


async def test_excess_is_refused(api: Http, store: Store, guarded: Guarded) -> None:
    key = await new_key_of(store, "red")
    job, until = await job_of(api, key), time.time() + 60.0
    group = ConnectionGroup(id_of(key), digest_of(key), job)
    others = {f"A/{number}": until for number in range(stream_connections.MAX_CONNECTIONS - 2)}
    await store.redis.zadd(f"streams:open:{group.name}", others)
    token = str((await given(api, job, key))["token"])
    assert [await comes_in(guarded.websocket, token=token) for _ in range(3)] == [True, True, False]


async def test_what_is_noted_is_forgotten_in_time(store: Store) -> None:
    connections, group, now = StreamConnections(store.redis), ConnectionGroup("k", "s", "j"), time.time()
    early, late = StreamConnection("A", 1), StreamConnection("B", 2)
    await connections.note(group, early, until=now + 10.0, now=now)
    await connections.note(group, late, until=now + 900.0, now=now)
    assert await connections.groups(now) == [group] and await connections.of(group, now) == [early, late]
    later = now + 10.0 + stream_connections.SLACK_S + 1.0
    assert await connections.of(group, later) == [late]
    assert await store.redis.ttl(f"streams:open:{group.name}") > 900.0
    await connections.gone(group, [early])
    assert await connections.groups(later) == [group]
    assert await connections.groups(now + 900.0 + stream_connections.SLACK_S + 1.0) == []
    await connections.note(group, late, until=now + 900.0, now=now)
    await connections.gone(group, [late])
    assert await connections.groups(now) == [] and not await store.redis.keys("streams:open*")


# --- several nats-servers -------------------------------------------------------------------------------------------


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[list[Guarded]]:
    """A cluster without JetStream, of which none of this needs anything."""
    routes = [free_port(), free_port()]
    made: list[Guarded] = []
    access = Access(tmp_path / "access", nats_conf(tmp_path, 1))
    try:
        for number, route in enumerate(routes):
            port, directory = free_port(), tmp_path / f"server-{number}"
            directory.mkdir()
            conf = nats_conf(directory, port, server_name=f"s{number}")
            shipped = re.sub(r"^jetstream \{.*?^\}", "", conf.read_text(), flags=re.DOTALL | re.MULTILINE)
            named = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes if other != route)
            shipped += (
                f'\ncluster {{ name: "two", listen: "127.0.0.1:{route}", routes: [{named}], no_advertise: true }}\n'
            )
            conf.write_text(shipped)
            (directory / "access").mkdir()
            for file in access.folder.iterdir():  # the same users everywhere
                (directory / "access" / file.name).write_bytes(file.read_bytes())
            own = Access(directory / "access", conf, WebSocket(free_port()))
            server = Server([str(nats_binary()), "-c", str(own.nats_conf)], port, f"nats://127.0.0.1:{port}")
            made.append(Guarded(server, own))
        yield made
    finally:
        for one in made:
            one.server.kill()


async def test_connection_to_another_server_of_a_cluster_is_closed(
    two_servers: list[Guarded], valkey_server: Server, store: Store, tmp_path: Path
) -> None:
    here, there = two_servers
    key, job = await new_key_of(store, "red"), await new_job(store, tenant="red")
    token, _ = await StreamCredentialStore(store.redis).give(
        key=id_of(key), secret=digest_of(key), tenant="red", job=job, now=time.time(), life_s=600.0
    )
    async with (
        guarded_context(here, valkey_server, store, tmp_path / "data", streams=False) as ctx,
        running(NatsAuthCallout(ctx).run()),
        running(StreamDisconnector(ctx).run()),
        AsyncExitStack() as stack,
    ):
        for guarded in (here, there):

            async def lets_in(guarded: Guarded = guarded) -> bool:
                return await comes_in(guarded.websocket, token=token)

            await until(lets_in)  # the servers have found each other, and the question its way
        both = [await stack.enter_async_context(listening(token, guarded)) for guarded in two_servers]
        await revoked(store, key, job)
        await until(lambda: all(listener.closed for listener in both))
        for guarded in two_servers:
            assert not await comes_in(guarded.websocket, token=token)
