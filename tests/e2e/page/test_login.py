"""Signing in to the page: at an OpenID provider, and what a browser keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from opentinker.services.scheduler.login.cookies import SESSION
from tests.conftest import NewContext
from tests.e2e.page.conftest import IN_BROWSER, Open, Tab
from tests.support.api import OPERATOR, Http
from tests.support.oidc.login import with_provider
from tests.support.oidc.provider import oidc_provider
from tests.support.scheduling import new_job, scheduler

pytestmark = IN_BROWSER


async def test_a_user_signs_in_at_the_provider_works_and_signs_out(
    chromium: Browser, new_context: NewContext, tmp_path: Path
) -> None:
    async with oidc_provider() as provider, new_context() as ctx:
        with_provider(ctx, provider, tmp_path / "secret")
        async with scheduler(ctx) as url:
            job = await new_job(ctx.store, tenant="ml")
            ground = await chromium.new_context()
            tab = Tab(await ground.new_page(), url)
            provider.user["groups"] = ["staff", "readers"]
            several = ",".join([await new_job(ctx.store, f"j-{number:010}", tenant="ml") for number in range(24)])
            view = f"compare/{several}/by=tag"
            await tab.go(view)
            await tab.page.get_by_role("link", name="Sign in with Lab ID").click()
            await tab.shows("ada@lab.example is in no group that has a role here: your groups are staff, readers.")
            await tab.shows("Ask help@lab.example")
            await expect(tab.page).to_have_url(f"{url}/#/{view}")
            provider.user["groups"] = ["ml-team"]
            await tab.page.get_by_role("link", name="Sign in with Lab ID").click()
            await tab.shows("ada@lab.example, member of ml")
            await expect(tab.page).to_have_url(f"{url}/#/{view}")
            await tab.go("jobs", job, "config")
            assert await tab.page.evaluate("document.cookie") == ""
            (cookie,) = [one for one in await ground.cookies() if one["name"].startswith(SESSION)]
            assert cookie["httpOnly"] and cookie["sameSite"] == "Lax"
            await tab.page.get_by_role("button", name="Cancel").click()
            await tab.shows("cancelled")
            second = Tab(await ground.new_page(), url)
            await second.go()
            await second.shows("member of ml")
            await tab.page.get_by_role("button", name="Sign out").click()
            await expect(tab.page.get_by_role("link", name="Sign in with Lab ID")).to_be_visible()
            await second.page.reload()
            await expect(second.page.get_by_role("link", name="Sign in with Lab ID")).to_be_visible()
            await second.go("?search=a+b&by=model&tag=x")
            await second.page.get_by_role("link", name="Sign in with Lab ID").click()
            await second.shows("member of ml")
            await expect(second.page).to_have_url(f"{url}/#/?search=a+b&by=model&tag=x")
            await second.page.get_by_role("button", name="Sign out").click()
            await expect(second.page.get_by_role("link", name="Sign in with Lab ID")).to_be_visible()
            assert tab.complaints == [] == second.complaints
            assert not [one for one in await ground.cookies() if one["name"].startswith(SESSION)]
            await ground.close()


async def test_the_documents_of_the_api_are_those_of_the_session(opened: Open, http: Http) -> None:
    tab = await opened(http.url)
    await tab.page.goto(f"{http.url}/docs")
    await tab.shows("/v1/session")
    stranger = await opened(http.url, key="")
    await stranger.page.goto(f"{http.url}/docs")
    await stranger.shows("Unauthorized")


@pytest.mark.parametrize("storage", ["localStorage", "sessionStorage"])
async def test_the_browser_keeps_no_key(opened: Open, http: Http, storage: str) -> None:
    tab = await opened(http.url, key="")
    await tab.page.get_by_label("API key").fill(OPERATOR)
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.shows("operator of default")
    kept = str(await tab.page.evaluate(f"Object.values({storage})"))
    assert "ot_" not in kept
    await tab.page.reload()
    await tab.shows("operator of default")
