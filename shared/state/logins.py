"""Sign-ins through the identity provider that have begun in a browser and not come back: what Redis knows of them.

Redis keys (`{digest}` is the SHA-256 of a random text in a cookie of that browser):
    login:{digest}            JSON of Attempt, for ATTEMPT_S; read once
    login-problem:{digest}    why the last one failed, for PROBLEM_S; read once
"""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.security.key_text import digest_of

ATTEMPT_S, PROBLEM_S = 600, 300


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    """Comes back with the browser."""
    nonce: str
    """Comes back in the id token."""
    verifier: str
    """PKCE's: proves to the provider that who brings the code has begun the sign-in."""


class LoginStore:
    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def begin(self, cookie: str, attempt: Attempt) -> None:
        await self._redis.set(_of(cookie), msgspec.json.encode(attempt), ex=ATTEMPT_S)

    async def fail(self, cookie: str, problem: str) -> None:
        await self._redis.set(f"login-problem:{digest_of(cookie)}", problem, ex=PROBLEM_S)

    async def take(self, cookie: str) -> Attempt | None:
        """Return the attempt of this browser and forget it."""
        found = await self._redis.getdel(_of(cookie))
        return msgspec.json.decode(found, type=Attempt) if found else None

    async def problem(self, cookie: str) -> str | None:
        """Return why the last one of this browser failed, and forget it."""
        found: str | None = await self._redis.getdel(f"login-problem:{digest_of(cookie)}")
        return found


def _of(cookie: str) -> str:
    return f"login:{digest_of(cookie)}"
