"""Credentials for the live streams of a job: a real nats-server asks a real scheduler, over real WebSockets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from opentinker.services.scheduler.streams.credentials_api import reached_by
from opentinker.shared.config import Settings
from opentinker.shared.messaging.permissions import OPERATOR as OPERATOR_USER
from opentinker.shared.messaging.permissions import TABLE, inbox, wide
from opentinker.shared.messaging.subjects import METRIC, SCHEDULER, SERVICES, STREAMS, Subject
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import digest_of, new_key
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.store import Store
from opentinker.shared.state.stream_credentials import MAX_CREDENTIALS, PREFIX, StreamCredentialStore
from tests.conftest import Figure, Server, soon, until
from tests.support.api import Http, bearing, id_of, new_key_of
from tests.support.factories import make_point
from tests.support.scheduling import scheduler
from tests.support.streams import Guarded, comes_in, connected, given, guarded_context, guarded_nats, job_of

PAGE = "http://page.example:8080"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_nats(tmp_path_factory.mktemp("guarded"), origins=(PAGE,)) as guarded:
        yield guarded


@pytest.fixture
async def guarded_ctx(guarded: Guarded, valkey_server: Server, store: Store, tmp_path: Path) -> AsyncIterator[Context]:
    async with guarded_context(guarded, valkey_server, store, tmp_path / "data") as ctx:
        yield ctx


@pytest.fixture
async def api(guarded_ctx: Context) -> AsyncIterator[Http]:
    async with scheduler(guarded_ctx) as url, aiohttp.ClientSession() as session:
        yield Http(session, url)


# --- what may be heard ----------------------------------------------------------------------------------------------


def cells(own: str, foreign: str, credential: dict[str, Any]) -> tuple[dict[str, bool], set[str]]:
    """Subject -> whether it may be subscribed; subjects that are published to, in vain."""
    subscribe: dict[str, bool] = {}
    for subject in TABLE:
        shown = isinstance(subject, Subject) and bool(subject.shown)
        for job in (own, foreign, "x"):
            mine = subject.pattern.replace("{job}", job)
            subscribe[wide(mine)] = shown and job == own
            subscribe[wide(mine).replace("*", "x")] = shown and job == own
        subscribe[wide(subject.pattern)] = False
    patterns = (">", "*.>", "metric.>", "metric.*.trainer", "log.*.*", "$JS.>", "$SYS.>", "_INBOX.>", "$KV.>")
    subscribe |= dict.fromkeys(patterns, False)
    subscribe |= {f"{inbox(service)}.>": False for service in (*SERVICES, OPERATOR_USER, "stream", "stream.0")}
    subscribe[credential["inbox"] + ".>"] = subscribe[credential["inbox"] + ".x"] = True
    publish = {subject for subject in subscribe if "*" not in subject and ">" not in subject}
    for stream in (str(stream.name) for stream in STREAMS):
        calls = ("STREAM.INFO.{}", "STREAM.PURGE.{}", "STREAM.DELETE.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}",
                 "CONSUMER.CREATE.{}", "CONSUMER.CREATE.{}.c.metric." + own + ".trainer", "CONSUMER.MSG.NEXT.{}.c",
                 "CONSUMER.LIST.{}")  # fmt: skip
        publish |= {"$JS.API." + call.format(stream) for call in calls}
    publish |= {"$JS.API.INFO", "$SYS.REQ.USER.AUTH", "$SYS.REQ.SERVER.PING", "$SYS._INBOX.x", "_INBOX.scheduler.x"}
    return subscribe, publish


async def test_a_credential_is_for_one_job(api: Http, store: Store, guarded: Guarded, figure: Figure) -> None:
    red, blue = await new_key_of(store, "red"), await new_key_of(store, "blue")
    own, foreign = await job_of(api, red), await job_of(api, blue)
    credential = await given(api, own, red)
    subscribe, publish = cells(own, foreign, credential)
    asked = sorted(subscribe)
    wrong: list[str] = []
    for part in (asked[at : at + 30] for at in range(0, len(asked), 30)):  # a connection has few subscriptions
        async with connected(credential["servers"][0], token=credential["token"]) as listener:
            for subject in part:
                await listener.nc.subscribe(subject)
            await listener.said()
            wrong += [s for s in part if listener.was_refused("subscription", s) is subscribe[s]]
    async with connected(credential["servers"][0], token=credential["token"]) as listener:
        for subject in sorted(publish):
            await listener.nc.publish(subject, b"x")
        await listener.said()
        wrong += [s for s in publish if not listener.was_refused("publish", s)]
    assert wrong == []
    figure(f"stream credential: {len(subscribe) + len(publish)} cells, {sum(subscribe.values())} allowed")
    assert len(subscribe) + len(publish) > 150
    assert set(credential["subjects"].values()) <= {s for s, may in subscribe.items() if may}


async def test_only_messages_of_the_job_arrive(api: Http, store: Store, guarded_ctx: Context) -> None:
    key = await new_key_of(store, "red")
    job, other = await job_of(api, key), await job_of(api, key)
    credential = await given(api, job, key)
    prefix = {"inbox_prefix": credential["inbox"]}
    async with connected(credential["servers"][0], token=credential["token"], **prefix) as listener:
        for subject in (*credential["subjects"].values(), credential["inbox"] + ".>"):
            await listener.listen(subject)
        await listener.said()
        for name in (other, job):
            await guarded_ctx.bus.emit(METRIC, make_point(name, 1, {"loss": 1.0}), job=name, source="t")
        await until(lambda: f"metric.{job}.t" in listener.heard)
        assert not any(other in subject for subject in listener.heard) and listener.refused == []


async def test_the_answer_says_where_what_and_how_long(api: Http, store: Store, guarded: Guarded) -> None:
    key = await new_key_of(store, "red")
    job = await job_of(api, key)
    before = time.time()
    credential = await given(api, job, key)
    assert credential["servers"] == [guarded.websocket]
    assert before + 900 <= credential["expires_at"] <= time.time() + 900
    assert credential["subjects"]["metrics"] == f"metric.{job}.*" and credential["subjects"]["logs"] == f"log.{job}.*"
    assert credential["history"].keys() == credential["subjects"].keys()
    for name, path in credential["history"].items():
        paged = {"format": "json"} if name in ("logs", "events") else {}  # not the stream, which has no end
        status, _ = await api("GET", path, headers=bearing(key), params=paged)
        assert status == 200, path
    kept = await store.redis.keys("stream:*")
    assert len(kept) == 1 and credential["token"] not in str([await store.redis.hgetall(name) for name in kept])


# --- who comes in ---------------------------------------------------------------------------------------------------


async def expired(api: Http, store: Store, job: str, key: str) -> str:
    return await token_of(store, job, key, age_s=61.0)


async def of_a_revoked_key(api: Http, store: Store, job: str, key: str) -> str:
    credential = await given(api, job, key)
    await KeyStore(store.redis).revoke(id_of(key), now=time.time())
    return str(credential["token"])


async def of_a_rotated_key(api: Http, store: Store, job: str, key: str) -> str:
    credential = await given(api, job, key)
    await KeyStore(store.redis).rotate(id_of(key), new_key("local", id_of(key)), now=time.time(), grace_s=0.0)
    return str(credential["token"])


async def token_of(store: Store, job: str, key: str, age_s: float = 0.0) -> str:
    """A credential for a minute that nobody asked for."""
    secret, then = digest_of(key) if key else "", time.time() - age_s
    given = StreamCredentialStore(store.redis).give
    return (await given(key=id_of(key), secret=secret, tenant="red", job=job, now=then, life_s=60.0))[0]


async def of_an_expired_key(api: Http, store: Store, job: str, key: str) -> str:
    return await token_of(store, job, await new_key_of(store, "red", expires=time.time() - 1.0))


async def of_no_key(api: Http, store: Store, job: str, key: str) -> str:
    return await token_of(store, job, "")


async def of_a_job_that_is_gone(api: Http, store: Store, job: str, key: str) -> str:
    credential = await given(api, job, key)
    await store.redis.delete(f"job:{job}")
    return str(credential["token"])


async def of_another_tenants_job(api: Http, store: Store, job: str, key: str) -> str:
    """As nobody is given one."""
    return await token_of(store, await job_of(api, await new_key_of(store, "blue")), key)


async def never_given(api: Http, store: Store, job: str, key: str) -> str:
    return f"{PREFIX}{'0' * 16}_{'0' * 64}"


async def with_another_secret(api: Http, store: Store, job: str, key: str) -> str:
    token = str((await given(api, job, key))["token"])
    return token[:-1] + ("0" if token[-1] != "0" else "1")


async def an_api_key(api: Http, store: Store, job: str, key: str) -> str:
    return key


async def a_digest(api: Http, store: Store, job: str, key: str) -> str:
    return digest_of(str((await given(api, job, key))["token"]))


Worthless = Callable[[Http, Store, str, str], Awaitable[str]]
WORTHLESS: tuple[Worthless, ...] = (
    *(expired, of_a_revoked_key, of_a_rotated_key, of_an_expired_key, of_no_key, of_a_job_that_is_gone),
    *(of_another_tenants_job, never_given, with_another_secret, an_api_key, a_digest),
)


async def test_what_is_no_credential_any_more_opens_nothing(api: Http, store: Store, guarded: Guarded) -> None:
    for make in WORTHLESS:
        key = await new_key_of(store, "red")
        job = await job_of(api, key)
        token = await make(api, store, job, key)
        assert not await comes_in(guarded.websocket, token=token), make.__name__
    logins: tuple[dict[str, str], ...] = ({}, {"user": "x", "password": "y"}, {"user": SCHEDULER, "password": "y"})
    for login in logins:
        assert not await comes_in(guarded.websocket, **login)


async def test_a_credential_is_for_the_websocket_alone(api: Http, store: Store, guarded: Guarded) -> None:
    key = await new_key_of(store, "red")
    credential = await given(api, await job_of(api, key), key)
    assert await comes_in(guarded.websocket, token=credential["token"])
    assert not await comes_in(guarded.server.url, token=credential["token"])
    for user in (*SERVICES, OPERATOR_USER):
        login = {"user": user, "password": guarded.access.password("nats", user)}
        assert await comes_in(guarded.server.url, **login)
        assert not await comes_in(guarded.websocket, **login)


async def test_a_connection_ends_with_its_credential(api: Http, store: Store, guarded_ctx: Context) -> None:
    guarded_ctx.settings = guarded_ctx.settings.model_copy(update={"stream_credential_s": 8.0})
    key = await new_key_of(store, "red")
    credential = await given(api, await job_of(api, key), key)
    async with connected(credential["servers"][0], token=credential["token"]) as listener:
        await listener.said()
        await until(lambda: listener.closed)
    assert not await comes_in(credential["servers"][0], token=credential["token"])


async def test_who_is_in_stays_while_no_scheduler_runs(guarded_ctx: Context, store: Store, guarded: Guarded) -> None:
    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        async with scheduler(guarded_ctx) as url:
            key, api = await new_key_of(store, "red"), Http(session, url)
            job = await job_of(api, key)
            credential = await given(api, job, key)
            listener = await stack.enter_async_context(connected(guarded.websocket, token=credential["token"]))
            await listener.listen(credential["subjects"]["metrics"])
            await listener.said()
        await guarded_ctx.bus.emit(METRIC, make_point(job, 1, {}), job=job, source="t")
        await until(lambda: listener.heard)
        assert not await comes_in(guarded.websocket, token=credential["token"])
        async with scheduler(guarded_ctx):
            assert await comes_in(guarded.websocket, token=credential["token"])


async def test_pages_of_other_sites_are_refused_by_the_listener(guarded: Guarded) -> None:
    async with aiohttp.ClientSession() as session:

        async def opens(origin: str) -> bool:
            try:
                headers = {"Origin": origin}
                async with session.ws_connect(guarded.websocket, headers=headers) as socket:
                    return bool((await soon(socket.receive())).data.startswith(b"INFO"))
            except aiohttp.WSServerHandshakeError as error:
                assert error.status == 403
                return False

        assert await opens(PAGE)
        assert not await opens("http://page.example") and not await opens("https://page.example:8080")


# --- how many, and where there are none -----------------------------------------------------------------------------


async def test_a_key_has_so_many_at_a_time(api: Http, store: Store) -> None:
    key, other = await new_key_of(store, "red"), await new_key_of(store, "red")
    job, of = await job_of(api, key), f"streams:of:{id_of(key)}"
    await store.redis.zadd(of, {f"{number}": time.time() + 60.0 for number in range(MAX_CREDENTIALS - 1)})
    await given(api, job, key)
    status, body = await api("POST", f"/v1/jobs/{job}/stream-credentials", headers=bearing(key))
    assert status == 429 and f"{MAX_CREDENTIALS} credentials" in body["detail"]
    await given(api, job, other)
    first = (await store.redis.zrange(of, 0, 0))[0]
    await store.redis.zadd(of, {first: time.time() - 1.0})
    await given(api, job, key)


async def test_a_server_without_a_listener_says_so(http: Http) -> None:
    job = await http.job()
    status, body = await http("POST", f"/v1/jobs/{job}/stream-credentials")
    assert status == 409 and "nats_websocket_url" in body["detail"]


def test_a_listener_on_all_addresses_is_named_as_we_were() -> None:
    assert reached_by("ws://0.0.0.0:4223", "box.example") == "ws://box.example:4223"
    assert reached_by("ws://[::]:4223", "::1") == "ws://[::1]:4223"
    assert reached_by("wss://nats.example:443/live", "box.example") == "wss://nats.example:443/live"


def test_settings_of_streams_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "seed"
    for half in ({"nats_websocket_url": "ws://127.0.0.1:1"}, {"nats_issuer_file": file}):
        with pytest.raises(ValidationError, match="go together"):
            Settings(**half)
    for url in ("http://127.0.0.1:1", "ws://user:secret@host:1", "ws://host"):
        with pytest.raises(ValidationError):
            Settings(nats_websocket_url=url, nats_issuer_file=file)
    told = Settings.model_validate({"nats_websocket_origins": "https://a.example, http://localhost:5173"})
    assert told.nats_websocket_origins == ["https://a.example", "http://localhost:5173"]
    with pytest.raises(ValidationError, match=r"is no https"):
        Settings(nats_websocket_origins=["a.example"])
