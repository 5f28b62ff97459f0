"""Limits of the HTTP server for one client, and requests that no honest client sends."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from opentinker.services.scheduler.http import errors
from opentinker.services.scheduler.http.auth import AuthMiddleware
from opentinker.services.scheduler.http.rate_limit import HEADERS, TokenBuckets, behind_proxies
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.security.key_text import new_key, parse
from opentinker.shared.state.keys import KeyStore
from tests.conftest import soon, until
from tests.support.api import OPERATOR, bearing, new_key_of
from tests.support.scheduling import scheduler


@pytest.fixture
def change(ctx: Context) -> Callable[..., None]:
    def change(**settings: object) -> None:
        ctx.settings = Settings.model_validate(ctx.settings.model_dump() | settings)

    return change


class Raw:
    """Bytes to the server, and what it says."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, text: bytes) -> bytes:
        reader, writer = await self.open()
        try:
            writer.write(text)
            return await soon(reader.read(65536))
        finally:
            writer.close()
            with_reset = await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            assert all(result is None or isinstance(result, OSError) for result in with_reset)


@asynccontextmanager
async def served(ctx: Context) -> AsyncIterator[tuple[aiohttp.ClientSession, str, Raw]]:
    async with scheduler(ctx) as url, aiohttp.ClientSession(headers=bearing()) as session:
        yield session, url, Raw(url)


# --- rates ----------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_what_flows_in_and_no_more() -> None:
    buckets = TokenBuckets(per_s=10.0, burst=20.0)
    assert [buckets.take("a", 0.0) for _ in range(20)] == [0.0] * 20
    assert buckets.take("a", 0.0) == pytest.approx(0.1)
    assert buckets.take("b", 0.0) == 0.0, "everybody has a bucket of their own"
    assert buckets.take("a", 0.05) == pytest.approx(0.05)
    taken = sum(buckets.take("a", 0.01 * step) == 0.0 for step in range(1, 1001))
    assert 98 <= taken <= 101, "10 a second for 10 s"
    assert buckets.take("a", 1000.0) == buckets.take("a", 999.0) == 0.0, "a clock that goes back takes nothing"
    waits = [buckets.take("b", 2000.0) for _ in range(21)]
    buckets.give_back("b")
    assert waits[-1] > 0 and [buckets.take("b", 2000.0) > 0 for _ in range(2)] == [False, True]


def test_buckets_of_the_longest_unseen_are_forgotten() -> None:
    buckets = TokenBuckets(per_s=1.0, burst=1.0, max_clients=3)
    for asker in "abcd":
        assert buckets.take(asker, 0.0) == 0.0
    assert buckets.take("d", 0.0) > 0.0 and buckets.take("a", 0.0) == 0.0


async def test_too_many_requests_of_one_asker_wait_and_others_do_not(ctx: Context, change: Callable[..., None]) -> None:
    change(http_rate=0.001)  # one at once, the next in a quarter of an hour
    async with served(ctx) as (session, url, _):
        assert (await session.get(f"{url}/v1/jobs")).status == 200
        refused = await session.get(f"{url}/v1/jobs")
        body = await refused.json(content_type=None)
        assert refused.status == 429 and body["title"] == "Too many requests"
        assert 900 <= int(refused.headers["Retry-After"]) <= 1000
        assert (await session.get(f"{url}/healthz")).status == 200, "whoever watches it is answered"
        other = await session.get(f"{url}/v1/jobs", headers=bearing(await new_key_of(ctx.store)))
        assert other.status == 200


async def test_a_key_that_is_not_looked_at_gives_no_rate(ctx: Context, change: Callable[..., None]) -> None:
    change(http_rate=0.001)  # two of one address at once
    async with served(ctx) as (session, url, _):
        answers = []
        for _ in range(3):
            async with session.get(f"{url}/v1/login", headers=bearing(new_key("test"))) as response:
                answers.append(response.status)
        assert answers[0] == 200 and answers[-1] == 429, "a new key for every request would have a new bucket"


@pytest.mark.parametrize(
    ("proxies", "forwarded", "client"),
    [
        ([], ["203.0.113.9"], "127.0.0.1"),
        (["10.0.0.0/8"], ["203.0.113.9"], "127.0.0.1"),
        (["127.0.0.1"], [], "127.0.0.1"),
        (["127.0.0.1"], ["203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1"], ["192.0.2.1, 203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1"], ["192.0.2.1", "2001:db8::1"], "2001:db8::1"),
        (["127.0.0.1", "10.0.0.0/8"], ["192.0.2.1, 203.0.113.9, 10.1.2.3"], "203.0.113.9"),
        (["127.0.0.1", "10.0.0.0/8"], ["10.1.2.3"], "10.1.2.3"),
        (["127.0.0.1"], ["nonsense"], "127.0.0.1"),
        (["127.0.0.1"], ["203.0.113.9,"], "127.0.0.1"),
        (["127.0.0.0/8"], [", ".join(["203.0.113.9", *["127.0.0.2"] * 16])], "127.0.0.2"),
    ],
)
async def test_the_client_of_a_proxys_request_is_the_last_address_that_is_none(
    proxies: list[str], forwarded: list[str], client: str
) -> None:
    async def address(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.remote} {await request.text()}")

    app = web.Application(middlewares=[behind_proxies(proxies)])
    app.router.add_post("/", address)
    async with TestClient(TestServer(app)) as asking:
        headers = [("X-Forwarded-For", each) for each in forwarded]
        async with asking.post("/", data=b"body", headers=headers) as response:
            assert await response.text() == f"{client} body"


async def test_the_latency_of_a_proxys_request_is_observed() -> None:
    @Route("GET", "/of-a-proxy", Action.FREE)
    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[errors.last_resort, behind_proxies(["127.0.0.1"]), errors.problems])
    app.on_response_prepare.append(errors.begins)
    app.router.add_get("/of-a-proxy", empty)
    async with TestClient(TestServer(app)) as asking:
        assert (await asking.get("/of-a-proxy", headers={"X-Forwarded-For": "203.0.113.9"})).status == 200
    found = [
        sample for metric in errors.LATENCY.collect() for sample in metric.samples if sample.name.endswith("_count")
    ]
    assert [one.value for one in found if one.labels["route"] == "/of-a-proxy"] == [1.0]


@asynccontextmanager
async def throttled(ctx: Context, burst: float) -> AsyncIterator[Callable[..., Any]]:
    """A server whose /v1/jobs requires a key and /page none; gives requests to it, which return a status."""

    @Route("GET", "/v1/jobs", Action.JOBS_READ)
    async def jobs(_: web.Request) -> web.Response:
        return web.Response()

    @Route("GET", "/page", Action.FREE)
    async def page(_: web.Request) -> web.Response:
        return web.Response()

    auth = AuthMiddleware(ctx, TokenBuckets(0.001, burst)).authenticate
    app = web.Application(middlewares=[errors.problems, auth])
    app.add_routes([web.get("/v1/jobs", jobs), web.get("/page", page)])
    async with TestClient(TestServer(app)) as client:

        async def ask(key: str, path: str = "/v1/jobs") -> int:
            return (await client.get(path, headers=bearing(key))).status

        yield ask


async def test_guesses_of_an_address_are_limited(ctx: Context) -> None:
    good, late = await new_key_of(ctx.store), await new_key_of(ctx.store)
    async with throttled(ctx, burst=20.0) as ask:
        assert await ask(good) == 200
        assert await asyncio.gather(*(ask(f"malformed-{n}") for n in range(30))) == 30 * [401], "never looked up"
        assert await asyncio.gather(*(ask(new_key("test")) for _ in range(20))) == 20 * [401]
        assert await ask(new_key("test")) == 429
        assert await ask(late) == 429, "it was not seen before: it might be a guess"
        assert await ask(good) == 200


async def test_a_guess_is_not_believed_for_an_answer_that_requires_no_key(ctx: Context) -> None:
    async with throttled(ctx, burst=1.0) as ask:
        assert [await ask(new_key("test"), "/page") for _ in range(3)] == [200, 200, 200]
        assert [await ask(new_key("test")) for _ in range(2)] == [401, 429]


async def test_valid_keys_cost_no_token_until_they_are_revoked(ctx: Context) -> None:
    key, other = await new_key_of(ctx.store), await new_key_of(ctx.store)
    _, id = parse(key) or ("", "")
    async with throttled(ctx, burst=1.0) as ask:
        assert [await ask(text) for text in (key, other, key)] == [200, 200, 200]
        await KeyStore(ctx.store.redis).revoke(id, now=time.time())

        await until(lambda: ask(key), lambda status: status == 401)
        assert [await ask(key) for _ in range(2)] == [401, 429]


# --- odd requests ---------------------------------------------------------------------------------------------------

ODD = ("/v1/jobs/..%2f..%2fetc%2fpasswd", "/v1/jobs/%2e%2e/x", "/v1/jobs/../../etc/passwd", "/v1/jobs/a%00b",
       "/v1/jobs/a%0ab", "/v1/environments/..%5c..%5cx", "/v1/environments/%2E%2E%2Fx", "/v1/served/..%2Fx",
       "/%2e%2e/%2e%2e/etc/passwd",
       "/v1/jobs/j/checkpoints/..%2f..%2f/download", "/v1/jobs/./x")  # fmt: skip


@pytest.mark.parametrize("path", ODD)
async def test_paths_that_mean_another_place_are_no_paths(ctx: Context, path: str) -> None:
    async with served(ctx) as (_, _, raw):
        answer = await raw.say(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404"), answer[:200]


async def test_compressed_bodies_are_not_taken_and_not_unpacked(ctx: Context) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    async with served(ctx) as (session, url, _):
        for path, encoding in (
            ("/v1/jobs", "gzip"),
            ("/v1/environments", "gzip"),
            ("/v1/jobs", "deflate"),
            ("/v1/jobs", "br"),
        ):
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            answer = await session.post(f"{url}/v1/{path}", data=bomb, headers=headers)
            body = await answer.json(content_type=None)
            assert answer.status == 415 and encoding in body["detail"], body


async def test_parameters_that_a_route_would_ignore_are_refused(ctx: Context) -> None:
    async with served(ctx) as (session, url, _):
        answer = await session.get(f"{url}/v1/jobs?limt=3")
        (mistake,) = (await answer.json(content_type=None))["errors"]
        assert answer.status == 422 and mistake["field"] == "limt" and "did you mean limit?" in mistake["problem"]
        answer = await session.get(f"{url}/v1/workers?all=1")
        (mistake,) = (await answer.json(content_type=None))["errors"]
        assert "takes no parameters" in mistake["problem"]


async def test_a_body_that_stops_half_way_is_given_up(ctx: Context, change: Callable[..., None]) -> None:
    change(http_body_s=0.2)
    async with served(ctx) as (_, _, raw):
        for path in ("/v1/jobs", "/v1/environments"):
            own = f"Authorization: Bearer {OPERATOR}\r\n"
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{own}Content-Length: 1000\r\n\r\n{{"
            answer = await raw.say(head.encode())
            assert answer.startswith(b"HTTP/1.1 408"), answer[:200]


async def test_heads_of_requests_are_bounded(ctx: Context) -> None:
    many = "".join(f"X-{n}: 1\r\n" for n in range(HEADERS["max_headers"] + 1))
    long = f"X-Long: {'x' * (HEADERS['max_field_size'] + 1)}\r\n"
    line = "/" + "a" * (HEADERS["max_line_size"] + 1)
    async with served(ctx) as (_, _, raw):
        for path, headers in (("/healthz", many), ("/healthz", long), (line, "")):
            answer = await raw.say(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]


async def test_connections_of_an_address_are_limited(ctx: Context, change: Callable[..., None]) -> None:
    change(http_connections_per_address=3)
    async with served(ctx) as (_, _, raw):
        held = [await raw.open() for _ in range(3)]
        for reader, writer in held:  # they are there, not only on their way
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await soon(reader.readline())).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            assert await raw.say(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
            raise ConnectionResetError
        for _, writer in held:
            writer.close()

        async def answered() -> bool:
            try:
                return b" 200 " in await raw.say(
                    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
            except OSError:
                return False

        await until(answered)


async def test_what_was_pushed_is_what_was_sent(ctx: Context) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    body = out.getvalue()

    def said(of: bytes) -> str:
        return f"sha-256=:{base64.b64encode(hashlib.sha256(of).digest()).decode()}:"

    async with served(ctx) as (session, url, _):
        for digest, field in (
            (said(b"other"), "Content-Digest"),
            ("md5=:x:", "Content-Digest"),
            (said(body), "(package)"),
        ):
            answer = await session.post(f"{url}/v1/environments", data=body, headers={"Content-Digest": digest})
            found = (await answer.json(content_type=None))["errors"]
            assert answer.status == 422 and field in {error["field"] for error in found}, found


def test_a_setting_of_no_rate_is_refused() -> None:
    with pytest.raises(Exception, match="http_rate"):
        Settings(http_rate=0.0)
