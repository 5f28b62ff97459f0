"""Signing in through an OpenID provider: the whole way, its keys, and what groups allow."""

from __future__ import annotations

from functools import partial
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.login import provider as provider_module
from opentinker.services.scheduler.login.cookies import LOGIN, SESSION
from opentinker.services.scheduler.login.oidc_api import LOGINS_BURST
from opentinker.services.scheduler.sweeps.trial_jobs import submitted_job
from opentinker.shared import api_types
from opentinker.shared.state.logins import ATTEMPT_S
from opentinker.shared.state.sessions import session_id
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.sweeps import SweepRecord
from tests.conftest import until
from tests.integration.access.test_sessions import audit
from tests.support.api import SPEC, fits, new_key_of
from tests.support.browsing import browser
from tests.support.oidc.login import Open, signs_in
from tests.support.oidc.provider import ADA, SECRET, Provider
from tests.support.sweeps import play, swept

# --- the whole way --------------------------------------------------------------------------------------------------


async def test_a_user_signs_in_makes_a_job_and_signs_out(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url), browser(url) as page:
        _, found = await page("GET", "/v1/login")
        assert found["provider"] == {"name": "Lab ID", "address": f"{url}/v1/login/oidc"}
        assert await signs_in(page) == ""
        assert page.landed == f"{url}/#/"
        status, who = await page.asks("GET", "/v1/whoami")
        fits(who, api_types.WhoAmI)
        assert (who["user"], who["tenant"], who["role"], who["key"]) == ("ada@lab.example", "ml", "member", None)
        status, job = await page.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        assert (status, job["key"], job["tenant"]) == (201, "ada@lab.example", "ml")
        _, listed = await page.asks("GET", "/v1/jobs", params={"owner": "ada@lab.example"})
        assert [one["id"] for one in listed["jobs"]] == [job["id"]]
        assert (await page.asks("POST", "/v1/keys", data=orjson.dumps({"role": "member"})))[0] == 403
        assert (await page.asks("DELETE", "/v1/session"))[0] == 200
        assert (await page("GET", "/v1/whoami"))[0] == 401
        lines = [(line["path"], line["result"], line.get("user")) for line in audit(ctx.settings.data_dir)]
    ada = "ada@lab.example"
    assert lines[:2] == [("/v1/login/oidc/callback", 303, ada), ("/v1/jobs", 201, ada)]
    assert lines[3] == ("/v1/session", 200, ada)


async def test_a_sweep_of_a_user_goes_on_after_the_user_signed_out(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url), browser(url) as page:
        assert await signs_in(page) == ""
        status, sweep = await page.asks("POST", "/v1/sweeps", data=orjson.dumps(swept(max_running=1)))
        assert (status, sweep["key"]) == (201, "ada@lab.example")
        store = SweepStore(ctx.store.redis)
        for number in (1, 2):
            over = await until(partial(store.sweep, sweep["id"]), partial(_has_jobs_or_ended, number))
            assert (over.state, over.reason) == ("running", "")
            assert (over.progress.jobs, over.key) == (number, "ada@lab.example")
            job = await submitted_job(ctx, sweep["id"], "ml", number - 1, 0)
            if number == 1:
                assert (await page.asks("DELETE", "/v1/session"))[0] == 200
            await play(ctx, job, [0.5])


def _has_jobs_or_ended(number: int, sweep: SweepRecord) -> bool:
    return sweep.progress.jobs == number or sweep.state != "running"


async def test_signing_in_again_ends_the_session_that_the_browser_had(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url), browser(url) as page, browser(url) as other:
        for browsing in (page, other, page):
            assert await signs_in(browsing) == ""
        assert len(await ctx.store.redis.keys("session:*")) == 2
        assert [(await one("GET", "/v1/whoami"))[0] for one in (page, other)] == [200, 200]


async def test_each_sign_in_has_its_own_secrets_and_shows_none(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url), browser(url) as page:
        async with page.session.get(f"{url}/v1/login/oidc", allow_redirects=False) as begun:
            (cookie,) = begun.headers.getall("Set-Cookie")
            assert cookie.startswith(LOGIN) and "HttpOnly" in cookie and "SameSite=Lax" in cookie
        (name,) = await ctx.store.redis.keys("login:*")
        assert 0 < await ctx.store.redis.ttl(name) <= ATTEMPT_S
        attempt = orjson.loads(await ctx.store.redis.get(name))
        assert attempt["verifier"] not in begun.headers["Location"]
        async with page.session.get(begun.headers["Location"], allow_redirects=False) as back:
            pass
        async with page.session.get(back.headers["Location"], allow_redirects=False) as done:
            cookies = "\n".join(done.headers.getall("Set-Cookie"))
        assert SESSION in cookies and "HttpOnly" in cookies and done.headers["Location"] == f"{url}/#/"
        assert await ctx.store.redis.keys("login*") == [], "used once"
        await signs_in(page)
        for secret in ("state", "nonce", "code_challenge"):
            first, second = (asked[secret] for asked in provider.asked)
            assert first != second and len(first) >= 43
        (kept,) = [await ctx.store.redis.hgetall(name) for name in await ctx.store.redis.keys("session:*")]
        assert page.token not in str(kept), "the second sign-in ended the session of the first"


async def test_the_client_secret_may_stand_in_the_environment(
    served: Open, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_OIDC_CLIENT_SECRET", SECRET)
    async with served(oidc_client_secret_file=None) as (_, url), browser(url) as page:
        assert await signs_in(page) == ""


# --- keys of the provider -------------------------------------------------------------------------------------------


async def test_keys_are_cached_and_fetched_again_for_a_new_one(
    served: Open, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def problem(url: str) -> str:
        async with browser(url) as page:
            return await signs_in(page)

    ours = provider_module.Provider
    monkeypatch.setattr(provider_module, "Provider", partial(ours, refetch_s=600.0))
    async with served() as (_, url):
        for _ in range(2):
            assert await problem(url) == ""
        assert [provider.fetched.count(path) for path in ("/jwks", "/.well-known/openid-configuration")] == [1, 1]
        provider.rotate()
        for _ in range(3):
            assert "id token is not valid" in await problem(url), "they have just been fetched"
        assert provider.fetched.count("/jwks") == 1, "wrong tokens do not make us ask"
    monkeypatch.setattr(provider_module, "Provider", partial(ours, refetch_s=0.0))
    async with served() as (_, url):
        assert await problem(url) == ""
        provider.rotate()
        assert await problem(url) == "" and provider.fetched.count("/jwks") == 3


async def test_keys_that_are_not_for_signatures_are_passed_over(served: Open, provider: Provider) -> None:
    class Other:
        def as_dict(self, private: bool) -> dict[str, str]:
            return {"kty": "strange", "kid": "x"}

    provider.keys.append(Other())
    async with served() as (_, url), browser(url) as page:
        assert await signs_in(page) == ""


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "granted"),
    [
        (["ml-team"], ("ml", "member")),
        (["ml-team", "ml-leads"], ("ml", "admin")),
        (["guests", "ml-team"], ("ml", "member")),
        (["ops", "guests"], ("visitors", "viewer")),
        ("ops", ("default", "operator")),
    ],
)
async def test_the_first_group_decides_the_tenant_and_the_highest_role_counts(
    served: Open, provider: Provider, groups: Any, granted: tuple[str, str]
) -> None:
    provider.user["groups"] = groups
    async with served() as (_, url), browser(url) as page:
        assert await signs_in(page) == ""
        _, who = await page("GET", "/v1/whoami")
        assert (who["tenant"], who["role"]) == granted


async def test_a_user_without_a_role_hears_which_groups_were_seen_and_whom_to_ask(
    served: Open, provider: Provider
) -> None:
    async with served() as (_, url), browser(url) as page:
        for groups, seen in (
            (["staff", "Ml-team"], "your groups are staff, Ml-team."),
            ([f"g{n}" for n in range(30)], "g19 and 10 more."),
            ([7, {"x": 1}, None], "named none of your groups."),
            ([], "named none of your groups."),
            (["a\x1b[31m\nb"], "your groups are a\ufffd[31m\ufffdb."),
        ):
            provider.user["groups"] = groups
            problem = await signs_in(page)
            assert problem.startswith("ada@lab.example is in no group that has a role here") and seen in problem
            assert problem.endswith("Ask help@lab.example.")


async def test_groups_may_stand_deep_in_the_token_or_in_the_answer_about_the_user(
    served: Open, provider: Provider
) -> None:
    provider.user = {"sub": "1", "realm_access": {"roles": ["ml-team"]}}
    async with served(oidc_groups_claim="realm_access.roles") as (_, url), browser(url) as page:
        assert await signs_in(page) == ""
    provider.user, provider.userinfo = {"sub": "1"}, {"sub": "1", "groups": ["guests"], "email": "ada@lab.example"}
    async with served() as (_, url), browser(url) as page:
        assert await signs_in(page) == ""
        _, who = await page("GET", "/v1/whoami")
        assert (who["user"], who["tenant"]) == ("ada@lab.example", "visitors")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"email_verified": False}, ADA["sub"]),
        ({"email": None}, ADA["sub"]),
        ({"email": "", "sub": "abcdefghij"}, "user:abcdefghij"),
        ({"email": "a\nb@x"}, "a\ufffdb@x"),
    ],
)
async def test_a_name_is_verified_printable_and_no_keys_id(
    served: Open, provider: Provider, told: dict[str, Any], name: str
) -> None:
    provider.user |= told
    async with served() as (_, url), browser(url) as page:
        assert await signs_in(page) == ""
        assert (await page("GET", "/v1/whoami"))[1]["user"] == name


async def test_a_session_ends_when_its_group_has_no_role_any_more(served: Open, provider: Provider) -> None:
    async with served() as (_, url), browser(url) as page:
        assert await signs_in(page) == ""
        token = page.token
        assert session_id(token)
    changes: list[tuple[dict[str, Any], int, str]] = [
        ({"oidc_groups": {"ml-team": {"tenant": "ml", "role": "viewer"}}}, 200, "viewer"),
        ({"oidc_groups": {"ml-team": {"tenant": "other", "role": "admin"}}}, 401, ""),
        ({"oidc_groups": {"guests": {"tenant": "ml", "role": "admin"}}}, 401, ""),
        ({"oidc_issuer": "http://127.0.0.1:9"}, 401, ""),
    ]
    for more, status, role in changes:
        async with served(**more) as (_, url), aiohttp.ClientSession() as session:
            headers = {"Cookie": f"{SESSION}-{url.rpartition(':')[2]}={token}"}
            async with session.get(f"{url}/v1/whoami", headers=headers) as response:
                assert response.status == status, more
                if role:
                    assert (await response.json())["role"] == role


async def test_users_of_one_tenant_see_nothing_of_another(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url), browser(url) as ada, browser(url) as guest:
        assert await signs_in(ada) == ""
        provider.user = {"sub": "2", "email": "bob@lab.example", "email_verified": True, "groups": ["guests"]}
        assert await signs_in(guest) == ""
        _, job = await ada.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC))
        for path in ("", "/metrics", "/transcripts", "/checkpoints"):
            assert (await guest.asks("GET", f"/v1/jobs/{job['id']}{path}"))[0] == 404, path
        assert (await guest.asks("GET", "/v1/jobs"))[1]["jobs"] == []
        assert (await guest.asks("POST", "/v1/jobs", data=orjson.dumps(SPEC)))[0] == 403
        admin = await new_key_of(ctx.store, "ml")
        async with browser(url, admin) as page:
            _, listed = await page.asks("GET", "/v1/sessions")
            assert {one["user"] for one in listed["sessions"]} == {"ada@lab.example", None}
            (theirs,) = [one["id"] for one in listed["sessions"] if one["user"]]
            assert (await page.asks("POST", f"/v1/sessions/{theirs}/revoke"))[0] == 200


# --- bounds ---------------------------------------------------------------------------------------------------------


async def test_a_server_without_a_provider_says_so(url: str) -> None:
    async with browser(url) as page:
        assert (await page("GET", "/v1/login"))[1]["provider"] is None
        for path in ("/v1/login/oidc", "/v1/login/oidc/callback"):
            status, answer = await page("GET", path)
            assert status == 409 and "oidc_issuer" in answer["detail"]


async def test_one_address_begins_only_so_many_sign_ins_and_behind_a_proxy_each_client(served: Open) -> None:
    async with served(http_proxies=["127.0.0.1"]) as (ctx, url), browser(url) as page:

        async def begins(client: str) -> int:
            headers = {"X-Forwarded-For": client}
            async with page.session.get(f"{url}/v1/login/oidc", headers=headers, allow_redirects=False) as response:
                return response.status

        begun = 0
        while (status := await begins("203.0.113.1")) == 303:
            begun += 1
        assert status == 429 and LOGINS_BURST <= begun == len(await ctx.store.redis.keys("login:*"))
        assert await begins("203.0.113.2") == 303
