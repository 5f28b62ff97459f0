"""No lie of an OpenID provider, and no answer to another browser, makes a session."""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web

from opentinker.services.scheduler.login import provider as provider_module
from opentinker.shared.config import Settings
from tests.conftest import free_port
from tests.integration.access.test_sessions import audit
from tests.support.browsing import Browser, browser
from tests.support.oidc.login import Open, signs_in
from tests.support.oidc.provider import ADA, CLIENT, SECRET, Provider, new_signing_key


def _set(**claims: Any) -> Callable[[Provider], None]:
    def lie(provider: Provider) -> None:
        provider.lie = lambda told: told.update({k: v() if callable(v) else v for k, v in claims.items()})

    return lie


def _without(claim: str) -> Callable[[Provider], None]:
    def lie(provider: Provider) -> None:
        provider.lie = lambda told: told.pop(claim)

    return lie


def signed_by_somebody_else(provider: Provider) -> None:
    provider.signed_with = new_signing_key()


def _unsigned(provider: Provider, header: dict[str, str], signature: Callable[[bytes], str]) -> None:
    """An id token that is not the work of the private key."""

    def signed(asked: dict[str, str]) -> str:
        now = int(time.time())
        claims = {"iss": provider.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"], **ADA}
        parts = [base64.urlsafe_b64encode(orjson.dumps(part)).decode().rstrip("=") for part in (header, claims)]
        return ".".join([*parts, signature(".".join(parts).encode())])

    provider.signed = signed  # type: ignore[method-assign]


def not_signed_at_all(provider: Provider) -> None:
    _unsigned(provider, {"alg": "none"}, lambda _: "")


def _hashed(secret: bytes) -> Callable[[bytes], str]:
    def sign(data: bytes) -> str:
        return base64.urlsafe_b64encode(hmac.digest(secret, data, "sha256")).decode().rstrip("=")

    return sign


def signed_with_the_public_key_as_a_password(provider: Provider) -> None:
    key = provider.keys[0]
    _unsigned(provider, {"alg": "HS256", "kid": key.kid}, _hashed(key.as_pem(private=False)))


def signed_with_the_client_secret(provider: Provider) -> None:
    _unsigned(provider, {"alg": "HS256"}, _hashed(SECRET.encode()))


def about_somebody_else(provider: Provider) -> None:
    provider.user.pop("groups")
    provider.userinfo = {"sub": "another", "groups": ["ops"]}


def without_an_id_token(provider: Provider) -> None:
    provider.answer = web.json_response({"access_token": "x", "token_type": "Bearer"})


def not_json(provider: Provider) -> None:
    provider.answer = web.Response(text="<html>")


def broken(provider: Provider) -> None:
    provider.answer = web.json_response({"error": "server_error", "error_description": "no luck"}, status=500)


def too_much(provider: Provider) -> None:
    provider.answer = web.Response(body=b'{"id_token":"' + b"x" * provider_module.MAX_BYTES + b'"}')


def another_place(provider: Provider) -> None:
    provider.answer = web.Response(status=307, headers={"Location": f"{provider.issuer}/jwks"})


def refused_by_the_user(provider: Provider) -> None:
    provider.refuse = "access_denied"


LIES: list[tuple[str, Callable[[Provider], None], str]] = [
    ("another nonce", _set(nonce="x"), "nonce"),
    ("no nonce", _without("nonce"), "nonce"),
    ("another audience", _set(aud="somebody-else"), "aud"),
    ("no audience", _without("aud"), "aud"),
    ("another party", _set(aud=[CLIENT, "other"], azp="other"), "azp"),
    ("another issuer", _set(iss="https://elsewhere.example"), "iss"),
    ("expired", _set(exp=lambda: int(time.time()) - 120), "expired"),
    ("without an end", _without("exp"), "exp"),
    ("not yet valid", _set(nbf=lambda: int(time.time()) + 600), "not yet valid"),
    ("no subject", _without("sub"), "sub"),
    ("a strange subject", _set(sub=["x"]), "sub"),
    ("another hash of the access token", _set(at_hash="AAAAAAAAAAAAAAAAAAAAAA"), "at_hash"),
    ("signature", signed_by_somebody_else, "signature"),
    ("no signature", not_signed_at_all, "id token is not valid"),
    ("public key as a password", signed_with_the_public_key_as_a_password, "id token is not valid"),
    ("client secret", signed_with_the_client_secret, "id token is not valid"),
    ("userinfo of another", about_somebody_else, "about another one"),
    ("no id token", without_an_id_token, "no id token"),
    ("no JSON", not_json, "no JSON object"),
    ("an error", broken, "answered 500, server_error, no luck"),
    ("too much", too_much, "more than"),
    ("a redirect", another_place, "answered 307"),
    ("a refusal", refused_by_the_user, "access_denied"),
]


async def test_no_lie_of_a_provider_makes_a_session(served: Open, provider: Provider) -> None:
    async with served() as (ctx, url):
        truth = dict(vars(provider)) | {"user": dict(ADA)}
        for name, lie, told in LIES:
            lie(provider)
            async with browser(url) as page:
                problem = await signs_in(page)
                assert told in problem and SECRET not in problem, (name, problem)
                assert page.token == "" and (await page("GET", "/v1/login"))[1]["problem"] is None, "said once"
            vars(provider).clear()
            vars(provider).update({**truth, "user": dict(ADA)})
        assert await ctx.store.redis.keys("session:*") == []
        async with browser(url) as page:
            assert await signs_in(page) == "", "the truth is believed"
        failed = [line for line in audit(ctx.settings.data_dir) if "failed" in line]
    assert len(failed) == len(LIES) and {line["path"] for line in failed} == {"/v1/login/oidc/callback"}


async def test_what_was_begun_in_one_browser_does_not_end_in_another(served: Open) -> None:
    async with served() as (ctx, url), browser(url) as attacker, browser(url) as victim:

        async def back(page: Browser) -> str:
            """As far as the provider's answer, which has not been used."""
            async with page.session.get(f"{url}/v1/login/oidc", allow_redirects=False) as begun:
                pass
            async with page.session.get(begun.headers["Location"], allow_redirects=False) as answered:
                return answered.headers["Location"]

        async def refused(page: Browser, address: str) -> None:
            async with page.session.get(address):
                pass
            assert "not begun in this browser" in (await page("GET", "/v1/login"))[1]["problem"]
            assert page.token == ""

        theirs = await back(attacker)
        await refused(victim, theirs)  # no attempt
        own = await back(victim)
        await refused(victim, theirs)  # another state
        await refused(victim, own)  # an attempt is for one answer
        own = await back(victim)
        await refused(victim, own.replace("state=", "state=x"))
        own = await back(victim)
        await refused(victim, own.partition("&state=")[0])
        own = await back(victim)
        async with victim.session.get(own):
            pass
        assert victim.token
        async with victim.session.get(own):  # again
            pass
        assert len(await ctx.store.redis.keys("session:*")) == 1


async def test_an_answer_that_names_another_issuer_is_refused(served: Open) -> None:
    async with served() as (_, url), browser(url) as page:
        async with page.session.get(f"{url}/v1/login/oidc", allow_redirects=False) as begun:
            pass
        async with page.session.get(begun.headers["Location"], allow_redirects=False) as back:
            pass
        async with page.session.get(back.headers["Location"] + "&iss=https://elsewhere.example"):
            pass
        assert "another provider" in (await page("GET", "/v1/login"))[1]["problem"]


class SlowProvider(provider_module.Provider):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, fetch_s=0.5)

    async def _endpoint(self, name: str) -> str:
        return f"{self._settings.oidc_issuer}/{'slow' if name == 'token_endpoint' else name.partition('_')[0]}"


async def test_a_provider_that_is_away_slow_or_another_says_so(
    served: Open, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(oidc_issuer=f"{provider.issuer}/") as (_, url), browser(url) as page:
        problem = await signs_in(page)
        assert "calls itself" in problem and "oidc_issuer" in problem and "help@lab.example" in problem
    async with served(oidc_issuer=f"http://127.0.0.1:{free_port()}") as (_, url), browser(url) as page:
        assert "does not answer" in await signs_in(page)
    monkeypatch.setattr(provider_module, "Provider", SlowProvider)
    async with served() as (_, url), browser(url) as page:
        assert "does not answer: TimeoutError" in await signs_in(page)
