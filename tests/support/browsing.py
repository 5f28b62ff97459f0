"""The page's side of a session, without a page: keeps cookies, and sends what the page would send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from opentinker.services.scheduler.login.cookies import CSRF, SESSION
from opentinker.shared.state.sessions import csrf_token
from tests.support.api import Http, bearing


class Browser(Http):
    csrf: str = ""
    landed: str = ""
    """Where it is now."""

    async def sign_in(self, key: str) -> None:
        status, answer = await self("POST", "/v1/session", headers=bearing(key) | {"Origin": self.url})
        assert status == 201, answer
        self.csrf = answer["csrf"]

    async def asks(
        self, method: str, path: str, headers: dict[str, str] | None = None, **request: Any
    ) -> tuple[int, Any]:
        """As the page does."""
        own = {"Origin": self.url, "Sec-Fetch-Site": "same-origin", CSRF: self.csrf}
        return await self(method, path, headers=own | (headers or {}), **request)

    @property
    def token(self) -> str:
        """The session's, which no page can read; empty without one."""
        found = [cookie.value for cookie in self.session.cookie_jar if cookie.key.startswith(SESSION)]
        return found[0] if found else ""


@asynccontextmanager
async def browser(url: str, key: str = "") -> AsyncIterator[Browser]:
    """Signed in with the key, if there is one."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        opened = Browser(session, url)
        if key:
            await opened.sign_in(key)
        yield opened


def showing(url: str, token: str) -> dict[str, str]:
    """Headers of a request of this session that the page has written."""
    return {"Cookie": f"{SESSION}-{url.rpartition(':')[2]}={token}", CSRF: csrf_token(token)}
