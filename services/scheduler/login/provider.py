"""The operator's OpenID provider: where people are sent to sign in, and what it says of them.

    discovery document, JWKS   fetched when needed, cached; keys again when a token names one that is not known
    code --token endpoint--> id token --signature, issuer, audience, times, nonce--> claims

All that is fetched is bounded in time and bytes, from https addresses (http on loopback), and follows no redirect.
Imported only where an issuer is set: Authlib belongs to the `server` extra.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, KeySet

from opentinker.services.scheduler.login.claims import claim_of
from opentinker.shared.config import Settings
from opentinker.shared.login_settings import is_provider_url
from opentinker.shared.types.errors import OpenTinkerError

CALLBACK = "/v1/login/oidc/callback"
MAX_BYTES = 1 << 18
"""Limit of an answer."""
DOCUMENT_S, KEYS_S = 3600.0, 600.0
"""Time for which the discovery document and the keys are used."""
MAX_KEYS = 100
LEEWAY_S = 60
"""Allowance for the provider's clock."""
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures with the provider's private key; none that the client secret, or nothing, could make."""


class ProviderError(OpenTinkerError):
    """`str(error)`: what is wrong with the provider or its answer; has no secrets."""


class Provider:
    def __init__(self, settings: Settings, *, fetch_s: float = 10.0, refetch_s: float = 5.0) -> None:
        """`fetch_s`: time limit of a request to the provider. `refetch_s`: keys are fetched no more often for tokens
        that name an unknown one. Raises SpecError: there is no client secret."""
        self._fetch_s, self._refetch_s = fetch_s, refetch_s
        self._settings, self._secret = settings, settings.client_secret()
        self._redirect = settings.public_url.rstrip("/") + CALLBACK
        self._document: tuple[dict[str, Any], float] | None = None
        self._keys: tuple[KeySet, float] | None = None
        """The keys and the time of their fetch."""
        self._fetching = asyncio.Lock()

    async def address(self, *, state: str, nonce: str, verifier: str) -> str:
        """Return where a browser signs in. Raises ProviderError."""
        at = await self._endpoint("authorization_endpoint")
        return str(
            prepare_grant_uri(
                at, self._settings.oidc_client_id, "code", self._redirect, self._settings.oidc_scopes, state,
                nonce=nonce, code_challenge=create_s256_code_challenge(verifier), code_challenge_method="S256",
            )
        )  # fmt: skip

    async def claims(self, code: str, *, nonce: str, verifier: str) -> dict[str, Any]:
        """Exchange the code that a browser brought for what the provider says of its user. Raises ProviderError."""
        tokens = await self._tokens(code, verifier)
        id_token, access_token = tokens.get("id_token"), tokens.get("access_token")
        if not isinstance(id_token, str):
            raise ProviderError("its answer has no id token; oidc_scopes must have openid")
        claims = await self._verified(id_token, access_token, nonce)
        document = await self._discovered()
        told = claim_of(claims, self._settings.oidc_groups_claim) is not None
        if told or "userinfo_endpoint" not in document or not isinstance(access_token, str):
            return claims
        more = await self._fetch(
            "GET", await self._endpoint("userinfo_endpoint"), {"Authorization": f"Bearer {access_token}"}
        )
        if more.get("sub") != claims["sub"]:
            raise ProviderError("its answer about the user is about another one")
        return {**more, **claims}

    async def _tokens(self, code: str, verifier: str) -> dict[str, Any]:
        body = prepare_token_request("authorization_code", "", self._redirect, code=code, code_verifier=verifier)
        listed = (await self._discovered()).get("token_endpoint_auth_methods_supported") or ()
        method = "client_secret_post" if "client_secret_post" in listed else "client_secret_basic"
        auth = ClientAuth(self._settings.oidc_client_id, self._secret, method)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        at, headers, body = auth.prepare("POST", await self._endpoint("token_endpoint"), headers, body)
        return await self._fetch("POST", at, headers, body)

    async def _verified(self, id_token: str, access_token: object, nonce: str) -> dict[str, Any]:
        settings = self._settings
        try:
            token = await self._signed(id_token)
            options = {"iss": {"essential": True, "value": settings.oidc_issuer}}
            options |= {"aud": {"essential": True, "value": settings.oidc_client_id}}
            params = {"nonce": nonce, "client_id": settings.oidc_client_id, "access_token": access_token}
            found = CodeIDToken(token.claims, token.header, options, params)
            found.validate(leeway=LEEWAY_S)
        except JoseError as error:
            raise ProviderError(f"its id token is not valid: {error}") from None
        if not isinstance(found["sub"], str) or not 0 < len(found["sub"]) <= 255:
            raise ProviderError("its id token names no user (sub)")
        return dict(found)

    async def _signed(self, id_token: str) -> jwt.Token:
        """Raises JoseError: no key of the provider has signed it, even as the provider lists them now."""
        keys, at = await self._known_keys()
        try:
            return jwt.decode(id_token, keys, ALGORITHMS)
        except JoseError:
            again, at_again = await self._known_keys(newer_than=at)
            if at_again == at:
                raise
            return jwt.decode(id_token, again, ALGORITHMS)

    async def _known_keys(self, newer_than: float | None = None) -> tuple[KeySet, float]:
        """`newer_than`: when those that did not fit were fetched."""
        async with self._fetching:
            now, known = time.monotonic(), self._keys
            if known is not None:
                age_s = now - known[1]
                if age_s < (KEYS_S if newer_than is None or known[1] > newer_than else self._refetch_s):
                    return known
            listed = (await self._fetch("GET", await self._endpoint("jwks_uri"))).get("keys")
            if not isinstance(listed, list) or not listed:
                raise ProviderError("it lists no keys")
            self._keys = _usable(listed[:MAX_KEYS]), now
            return self._keys

    async def _endpoint(self, name: str) -> str:
        url = (await self._discovered()).get(name)
        if not isinstance(url, str) or not is_provider_url(url.partition("?")[0], self._settings.oidc_issuer):
            raise ProviderError(f"its discovery document has no https address as {name}")
        return url

    async def _discovered(self) -> dict[str, Any]:
        now, issuer = time.monotonic(), self._settings.oidc_issuer
        if self._document is None or now - self._document[1] > DOCUMENT_S:
            document = await self._fetch("GET", issuer.rstrip("/") + "/.well-known/openid-configuration")
            if document.get("issuer") != issuer:
                raise ProviderError(
                    f"it calls itself {str(document.get('issuer'))[:200]!r}, not {issuer!r} (oidc_issuer)"
                )
            self._document = document, now
        return self._document[0]

    async def _fetch(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> dict[str, Any]:
        at = url.partition("?")[0]
        try:
            async with (
                asyncio.timeout(self._fetch_s),
                aiohttp.ClientSession(trust_env=True) as session,
                session.request(
                    method, url, data=body, headers={"Accept": "application/json", **(headers or {})},
                    allow_redirects=False,
                ) as response,
            ):  # fmt: skip
                raw = bytearray()
                async for piece in response.content.iter_chunked(1 << 14):
                    raw += piece
                    if len(raw) > MAX_BYTES:
                        raise ProviderError(f"{at} answered with more than {MAX_BYTES} bytes")
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ProviderError(f"{at} does not answer: {type(error).__name__}") from None
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        said = answer if isinstance(answer, dict) else {}
        if status != 200 or not isinstance(answer, dict):
            told = "".join(f", {said[name]}"[:200] for name in ("error", "error_description") if name in said)
            raise ProviderError(f"{at} answered {status}{told or '' if status != 200 else ', which is no JSON object'}")
        return answer


def _usable(listed: list[Any]) -> KeySet:
    """Return the keys for signatures of known kinds."""
    found = []
    for one in listed:
        if isinstance(one, dict) and one.get("use", "sig") == "sig" and one.get("kty") in ("RSA", "EC", "OKP"):
            try:
                found.append(JWKRegistry.import_key(one))
            except (JoseError, ValueError, TypeError, KeyError):
                continue
    if not found:
        raise ProviderError("it lists no key for signatures that is usable here")
    return KeySet(found)
