"""A server whose users sign in at a test's OpenID provider, and the way of a browser there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentinker.shared import api_types
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from tests.conftest import free_port
from tests.support.api import fits
from tests.support.browsing import Browser
from tests.support.oidc.provider import CLIENT, SECRET, Provider

GROUPS = {
    "ml-leads": {"tenant": "ml", "role": "admin"},
    "ml-team": {"tenant": "ml", "role": "member"},
    "guests": {"tenant": "visitors", "role": "viewer"},
    "ops": {"tenant": "default", "role": "operator"},
}
Open = Callable[..., Any]


def with_provider(ctx: Context, provider: Provider, secret: Path, **more: Any) -> None:
    """The settings of a server whose users sign in at this provider."""
    secret.write_text(SECRET)
    port = free_port()
    ctx.settings = Settings.model_validate(
        {
            **dict(ctx.settings), "http_port": port, "public_url": f"http://127.0.0.1:{port}",
            "oidc_issuer": provider.issuer, "oidc_client_id": CLIENT, "oidc_client_secret_file": secret,
            "oidc_groups": GROUPS, "oidc_name": "Lab ID", "oidc_contact": "help@lab.example", **more,
        }
    )  # fmt: skip


async def signs_in(page: Browser) -> str:
    """Go the way of a browser; return why it was refused, or nothing."""
    async with page.session.get(f"{page.url}/v1/login/oidc") as response:
        assert response.status == 200, "the page, at last"
        page.landed = str(response.real_url)
    status, found = await page("GET", "/v1/login")
    fits(found, api_types.Login)
    assert status == 200 and (found["csrf"] is None) == bool(found["problem"])
    page.csrf = found["csrf"] or ""
    return found["problem"] or ""
