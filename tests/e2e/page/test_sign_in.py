"""Access to the page in a real browser: keys, servers without keys, viewers."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from opentinker.shared.security.authorization import Role
from opentinker.shared.state.store import Store
from tests.conftest import NewContext
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import OPERATOR, Http, new_key_of
from tests.support.scheduling import scheduler

pytestmark = IN_BROWSER


async def test_a_key_is_asked_for_and_stays_in_the_tab(opened: Open, http: Http) -> None:
    job = await http.job()
    tab = await opened(http.url, key="")
    await tab.page.get_by_label("API key").fill(OPERATOR[:-1])
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.shows("malformed API key")
    await tab.page.get_by_label("API key").fill(OPERATOR)
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.shows(job)
    await tab.shows("operator of default")
    assert await tab.page.evaluate("document.cookie") == ""
    assert OPERATOR not in str(await tab.page.evaluate("Object.values(localStorage)"))
    assert not [url for url in tab.asked if OPERATOR in url]
    await tab.page.get_by_role("button", name="Sign out").click()
    await tab.shows("API key required")
    assert await tab.page.evaluate("sessionStorage.length") == 0


async def test_a_server_without_keys_says_so_loudly(opened: Open, new_context: NewContext) -> None:
    async with new_context(auth=False) as ctx, scheduler(ctx) as url:
        tab = await opened(url, key="")
        await tab.shows("This server requires no key")
        await tab.shows("No jobs yet")


@pytest.mark.nightly
async def test_a_viewer_sees_all_of_its_tenant_and_no_way_to_change_it(opened: Open, http: Http, store: Store) -> None:
    await http.job()
    async with http.session.get(f"{http.url}/v1/jobs") as response:
        other = (await response.json())["jobs"][0]["id"]
    viewer = await new_key_of(store, "red", Role.VIEWER)
    tab = await opened(http.url, key=viewer)
    await tab.shows("No jobs yet")
    await tab.go("jobs", other)
    await tab.shows(f"no job '{other}'")
    await tab.go("cluster")
    await tab.shows("Only operators")
    own = await new_key_of(store, "default", Role.VIEWER)
    tab = await opened(http.url, key=own)
    await tab.go("jobs", other)
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("test")
    assert await tab.page.get_by_role("button", name="Cancel").count() == 0
    assert await tab.page.get_by_role("link", name="Submit").count() == 0
