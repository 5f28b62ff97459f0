"""Sessions of the page: made with a key, shown by a cookie, and safe from pages of other sites."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.login.cookies import CSRF, HOST, SESSION
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.audit_log import folder, writers
from opentinker.shared.security.authorization import Action, Role
from opentinker.shared.security.key_text import digest_of, new_key, parse
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.sessions import MAX_SESSIONS, SessionStore, SignIn, csrf_token, session_id
from opentinker.shared.state.store import Store
from tests.conftest import NewContext, until
from tests.support.api import OPERATOR, SPEC, bearing, fits, new_key_of
from tests.support.browsing import Browser, browser, showing
from tests.support.scheduling import scheduler

ELSEWHERE = "https://elsewhere.example"


def id_of(key: str) -> str:
    return (parse(key) or ("", ""))[1]


async def test_a_key_is_exchanged_for_a_cookie_that_no_page_can_read(url: str, store: Store) -> None:
    async with browser(url) as page:
        status, found = await page("GET", "/v1/login")
        fits(found, api_types.Login)
        assert (status, found["auth"], found["csrf"], found["expires"]) == (200, "on", None, None)
        async with page.session.post(f"{url}/v1/session", headers=bearing(OPERATOR)) as response:
            (cookie,) = response.headers.getall("Set-Cookie")
            made = await response.json()
        fits(made, api_types.SignedIn)
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Path=/" in cookie
        assert "Secure" not in cookie and "Domain" not in cookie and HOST not in cookie
        assert response.headers["Cache-Control"] == "no-store" and page.token not in str(made)
        status, found = await page("GET", "/v1/login")
        assert (found["csrf"], found["expires"]) == (made["csrf"], pytest.approx(made["expires"], abs=5.0))
        status, who = await page("GET", "/v1/whoami")
        fits(who, api_types.WhoAmI)
        assert (status, who["role"], who["key"]) == (200, "operator", id_of(OPERATOR))
        kept = [await store.redis.hgetall(name) for name in await store.redis.keys("session:*")]
        assert len(kept) == 1 and page.token.rpartition("_")[2] not in str(kept) and OPERATOR not in str(kept)


@pytest.mark.parametrize("public_url", ["", "https://tinker.example"])
async def test_over_https_the_cookie_is_secure_and_for_this_host_alone(
    new_context: NewContext, public_url: str
) -> None:
    async with new_context(public_url=public_url) as ctx, scheduler(ctx) as url, browser(url) as page:
        host = {"Host": "tinker.example", "Origin": "https://tinker.example"}
        async with page.session.post(f"{url}/v1/session", headers=bearing(OPERATOR) | host) as response:
            (cookie,) = response.headers.getall("Set-Cookie")
        assert cookie.startswith(f"{HOST}{SESSION}=") and "Secure" in cookie and "Domain" not in cookie
        token = cookie.partition("=")[2].partition(";")[0]
        plain = {**host, "Cookie": f"{SESSION}={token}"}
        status, _ = await page("GET", "/v1/whoami", headers={**host, "Cookie": f"{HOST}{SESSION}={token}"})
        assert status == 200
        status, _ = await page("GET", "/v1/whoami", headers=plain)
        assert status == (401 if public_url else 200), "a neighbour below the same domain can set this one"


# --- requests that the page has not written -------------------------------------------------------------------------

CHANGES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/jobs"): SPEC,
    ("POST", "/v1/keys"): {"role": "viewer"},
    ("POST", "/v1/jobs/{job}/stream-credentials"): None,
    ("POST", "/v1/jobs/{job}/cancel"): None,
    ("PATCH", "/v1/jobs/{job}"): {"notes": "x"},
    ("DELETE", "/v1/jobs/{job}/artifacts"): None,
    ("DELETE", "/v1/session"): None,
}


async def test_what_changes_something_needs_the_token_of_the_session(url: str, store: Store) -> None:
    async with browser(url, OPERATOR) as page, browser(url, OPERATOR) as other:
        _, job = await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        for (method, path), body in CHANGES.items():
            request = {} if body is None else {"data": orjson.dumps(body)}
            for token in (None, "", csrf_token("x"), other.csrf, page.csrf[:-1], page.token):
                headers = {} if token is None else {CSRF: token}
                status, answer = await page(method, path.format(job=job["id"]), headers=headers, **request)
                assert status == 403 and CSRF in answer["detail"], (method, path, token)
        assert len(await store.redis.keys("key:*")) == 1 and len(await store.redis.keys("job:j-??????????")) == 1
        assert await store.redis.hmget(f"job:{job['id']}", "state", "notes") == ["queued", ""]
        status, _ = await page.asks("PATCH", f"/v1/jobs/{job['id']}", data=orjson.dumps({"notes": "x"}))
        assert status == 200


@pytest.mark.parametrize(
    "from_elsewhere",
    [{"Origin": ELSEWHERE}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}],
)
async def test_pages_of_other_sites_get_nothing_by_the_cookie(url: str, from_elsewhere: dict[str, str]) -> None:
    async with browser(url, OPERATOR) as page:
        for path in ("/v1/jobs", "/v1/whoami", "/v1/login", "/v1/jobs/j-0000000000/events"):
            assert (await page("GET", path, headers=from_elsewhere))[0] == 403, path
        for (method, path), body in CHANGES.items():
            request = {} if body is None else {"data": orjson.dumps(body)}
            status, _ = await page.asks(method, path.format(job="j-0000000000"), headers=from_elsewhere, **request)
            assert status == 403, path
        headers = bearing(OPERATOR) | from_elsewhere
        status, _answer = await page("POST", "/v1/session", headers=headers)
        assert status == 403, "somebody else's key would be used here without being noticed"


async def test_a_page_of_a_named_site_has_no_use_of_the_cookie(new_context: NewContext) -> None:
    """It may ask, with a key."""
    async with new_context(http_origins=[ELSEWHERE]) as ctx, scheduler(ctx) as url, browser(url, OPERATOR) as page:
        async with page.session.get(f"{url}/v1/jobs", headers={"Origin": ELSEWHERE}) as response:
            assert response.status == 403 and "Access-Control-Allow-Credentials" not in response.headers
        assert (await page("GET", "/v1/jobs", headers={"Origin": ELSEWHERE, **bearing()}))[0] == 200


async def test_a_websocket_needs_the_token_which_browsers_cannot_send(url: str) -> None:
    async with browser(url, OPERATOR) as page:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await page.session.ws_connect(f"{url}/v1/served/x", headers={"Origin": url})
        assert refused.value.status == 403


async def test_a_stream_is_read_by_the_cookie_and_needs_no_token(url: str) -> None:
    async with browser(url, OPERATOR) as page:
        _, job = await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        async with page.session.get(f"{url}/v1/jobs/{job['id']}/events") as response:
            assert response.status == 200 and b"data:" in await response.content.readuntil(b"\n\n")


async def test_programs_need_no_token_and_their_key_goes_before_a_cookie(url: str, store: Store) -> None:
    viewer = await new_key_of(store, "red", Role.VIEWER)
    async with browser(url, OPERATOR) as page:
        status, who = await page("GET", "/v1/whoami", headers=bearing(viewer))
        assert (status, who["tenant"]) == (200, "red")
        status, _ = await page("POST", "/v1/jobs", headers=bearing(OPERATOR), data=orjson.dumps(SPEC))
        assert status == 201
        assert (await page("GET", "/v1/whoami", headers={"Authorization": "Bearer x"}))[0] == 401


# --- how it ends ----------------------------------------------------------------------------------------------------

End = Callable[[Browser, Store, str], Awaitable[object]]


async def idle(page: Browser, store: Store, key: str) -> None:
    await store.redis.hset(f"session:{session_id(page.token)}", "used", time.time() - 8 * 3600)


async def too_old(page: Browser, store: Store, key: str) -> None:
    await store.redis.hset(f"session:{session_id(page.token)}", "expires", time.time() - 1.0)


async def signed_out(page: Browser, store: Store, key: str) -> None:
    token = page.token
    status, answer = await page.asks("DELETE", "/v1/session")
    fits(answer, api_types.SignedOut)
    assert status == 200 and page.token == "", "the browser forgets it"
    page.session.headers["Cookie"] = showing(page.url, token)["Cookie"]


async def revoked(page: Browser, store: Store, key: str) -> None:
    status, _ = await page("POST", f"/v1/sessions/{session_id(page.token)}/revoke", headers=bearing(OPERATOR))
    assert status == 200


async def its_key_revoked(page: Browser, store: Store, key: str) -> None:
    await KeyStore(store.redis).revoke(id_of(key), now=time.time())


async def its_key_rotated(page: Browser, store: Store, key: str) -> None:
    await KeyStore(store.redis).rotate(id_of(key), new_key("local", id_of(key)), now=time.time(), grace_s=0.0)


async def forgotten(page: Browser, store: Store, key: str) -> None:
    await store.redis.delete(f"session:{session_id(page.token)}")


@pytest.mark.parametrize(
    "end",
    [idle, too_old, signed_out, revoked, its_key_revoked, its_key_rotated, forgotten],
    ids=lambda end: end.__name__,
)
async def test_an_ended_session_opens_nothing_and_its_streams_are_cut_off(url: str, store: Store, end: End) -> None:
    key = await new_key_of(store, "red")
    async with browser(url, key) as page, browser(url, key) as stays:
        _, job = await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        async with page.session.get(f"{url}/v1/jobs/{job['id']}/events") as open_stream:
            assert open_stream.status == 200
            await end(page, store, key)
            with pytest.raises(aiohttp.ClientPayloadError):
                await open_stream.content.read()
        status, answer = await page("GET", "/v1/whoami")
        assert status == 401 and "sign in" in answer["detail"]
        assert (await page("GET", "/v1/login"))[1]["csrf"] is None
        if end not in (its_key_revoked, its_key_rotated):
            assert (await stays("GET", "/v1/whoami"))[0] == 200


async def test_use_keeps_a_session_from_being_idle(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with browser(url, OPERATOR) as page:
        record = f"session:{session_id(page.token)}"
        long_ago = time.time() - 8 * 3600 + 60
        await store.redis.hset(record, "used", long_ago)

        async def noted() -> bool:
            assert (await page("GET", "/v1/whoami"))[0] == 200
            return float(await store.redis.hget(record, "used")) > long_ago + 1.0

        await until(noted)


async def test_no_session_outlives_its_longest_life_however_often_it_is_used(new_context: NewContext) -> None:
    async with new_context(session_max_s=60.0) as ctx, scheduler(ctx) as url, browser(url, OPERATOR) as page:
        expires = (await page("GET", "/v1/login"))[1]["expires"]
        assert expires <= time.time() + 60.0
        assert await ctx.store.redis.expiretime(f"session:{session_id(page.token)}") <= time.time() + 60 + 61


async def test_one_key_has_so_many_sessions_and_a_further_one_ends_the_oldest(url: str, store: Store) -> None:
    key, other, now = await new_key_of(store, "red"), await new_key_of(store, "red"), time.time()
    for _ in range(MAX_SESSIONS - 3):
        later = SignIn(created=now, expires=now + 1e6, tenant="red", key=id_of(key), secret=digest_of(key))
        await SessionStore(store.redis).create(later)
    async with browser(url, other) as stays, browser(url, key) as first, browser(url, key) as second:
        tokens = [first.token, second.token]
        for _ in range(2):
            async with browser(url, key) as page:
                tokens.append(page.token)
        async with aiohttp.ClientSession() as session:
            answers = []
            for token in tokens:
                async with session.get(f"{url}/v1/whoami", headers=showing(url, token)) as response:
                    answers.append(response.status)
        assert answers == [401, 200, 200, 200]
        assert (await stays("GET", "/v1/whoami"))[0] == 200
    assert len(await SessionStore(store.redis).of("red")) == MAX_SESSIONS + 1


async def test_signing_in_again_ends_the_session_that_the_browser_had(url: str, store: Store) -> None:
    async with browser(url, await new_key_of(store, "red")) as page, browser(url, OPERATOR) as other:
        before = page.token
        await page.sign_in(OPERATOR)
        assert before != page.token
        async with aiohttp.ClientSession() as session:
            answers = []
            for token in (before, page.token, other.token):
                async with session.get(f"{url}/v1/whoami", headers=showing(url, token)) as response:
                    answers.append(response.status)
        assert answers == [401, 200, 200]
        forged = f"ot_session_{session_id(other.token)}_{'0' * 64}"
        async with aiohttp.ClientSession() as session:
            shown = bearing(OPERATOR) | {"Cookie": showing(url, forged)["Cookie"]}
            async with session.post(f"{url}/v1/session", headers=shown) as response:
                assert response.status == 201
        assert (await other("GET", "/v1/whoami"))[0] == 200, "an id is no proof of a session"


# --- whose they are -------------------------------------------------------------------------------------------------


async def test_admins_list_and_end_the_sessions_of_their_tenant(url: str, store: Store) -> None:
    admin, member = await new_key_of(store, "red"), await new_key_of(store, "red", Role.MEMBER)
    foreign = await new_key_of(store, "blue")
    async with browser(url, admin) as page, browser(url, member) as mate, browser(url, foreign) as stranger:
        _status, listed = await page.asks("GET", "/v1/sessions")
        fits(listed, api_types.Sessions)
        assert {(one["key"], one["role"], one["own"]) for one in listed["sessions"]} == {
            (id_of(admin), "admin", True),
            (id_of(member), "member", False),
        }
        assert (await mate.asks("GET", "/v1/sessions"))[0] == 403
        assert (await stranger.asks("GET", "/v1/sessions", params={"tenant": "red"}))[0] == 404
        mates = session_id(mate.token)
        assert (await stranger.asks("POST", f"/v1/sessions/{mates}/revoke"))[0] == 404
        assert (await page.asks("POST", f"/v1/sessions/{mates}/revoke"))[0] == 200
        assert (await page.asks("POST", f"/v1/sessions/{mates}/revoke"))[0] == 404
        await until(lambda: refused(mate))
        headers = bearing(OPERATOR)
        _, listed = await page("GET", "/v1/sessions", headers=headers, params={"tenant": "red"})
        assert [one["key"] for one in listed["sessions"]] == [id_of(admin)]


async def test_nobody_ends_a_session_that_allows_more_than_they_may(url: str, store: Store) -> None:
    admin = await new_key_of(store, "default")
    async with browser(url, OPERATOR) as operators, browser(url, admin) as page:
        status, body = await page.asks("POST", f"/v1/sessions/{session_id(operators.token)}/revoke")
        assert status == 403
        assert body["detail"] == "this session has the role operator, with rights that you lack"
        assert (await operators("GET", "/v1/whoami"))[0] == 200


async def test_a_session_allows_only_what_its_key_does(url: str, store: Store) -> None:
    narrow = await new_key_of(store, "red", Role.ADMIN, {Action.JOBS_READ})
    async with browser(url, narrow) as page:
        assert (await page.asks("GET", "/v1/jobs"))[0] == 200
        assert (await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC)))[0] == 403
        _, who = await page("GET", "/v1/whoami")
        assert who["scopes"] == ["jobs:read"]


async def test_a_session_makes_no_session(url: str) -> None:
    async with browser(url, OPERATOR) as page:
        status, answer = await page.asks("POST", "/v1/session")
        assert status == 409 and "API key" in answer["detail"]
        status, answer = await page("DELETE", "/v1/session", headers=bearing(OPERATOR))
        assert status == 409


async def test_the_audit_log_says_who_signed_in_and_by_which_session_they_act(ctx: Context, url: str) -> None:
    async with browser(url, OPERATOR) as page:
        id = session_id(page.token)
        await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        await page("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        await page.asks("DELETE", "/v1/session")
    lines = audit(ctx.settings.data_dir)
    found = [(line["method"], line["path"], line["result"], line.get("session")) for line in lines]
    assert found == [
        ("POST", "/v1/session", 201, None),
        ("POST", "/v1/jobs", 201, id),
        ("POST", "/v1/jobs", 403, id),
        ("DELETE", "/v1/session", 200, id),
    ]
    assert {line["key"] for line in lines} == {id_of(OPERATOR)}


def audit(data_dir: Path) -> list[dict[str, Any]]:
    (current,) = writers(folder(data_dir))
    return [orjson.loads(line) for line in current.read_bytes().splitlines()]


async def test_a_server_without_keys_has_no_sessions(new_context: NewContext) -> None:
    async with new_context(auth=False) as ctx, scheduler(ctx) as url, browser(url) as page:
        _, found = await page("GET", "/v1/login")
        assert (found["auth"], found["csrf"]) == ("off", None)
        assert (await page("POST", "/v1/session"))[0] == 409


async def refused(page: Browser) -> bool:
    return (await page("GET", "/v1/whoami"))[0] == 401
