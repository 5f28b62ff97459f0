"""A link shows its jobs to somebody without a key."""

from __future__ import annotations

from playwright.async_api import expect

from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import Http

pytestmark = IN_BROWSER


async def test_a_link_shows_a_job_and_a_comparison_to_somebody_without_a_key(opened: Open, http: Http) -> None:
    jobs = [await http.job() for _ in range(2)]
    for view in (("jobs", jobs[0], "config"), ("compare", ",".join(jobs), "by=tag")):
        tab = await opened(http.url, *view)
        await tab.page.locator("summary", has_text="Share").click()
        await tab.page.get_by_role("button", name="Make a link").click()
        link = await tab.page.get_by_label("Link").input_value()
        guest = await opened(http.url, key="")
        await guest.page.goto(link)
        await guest.page.reload()  # from now on the address has no key
        await guest.shows("shared with you")
        assert guest.page.url.endswith("#/" + "/".join(view)) and "/share/" not in guest.page.url
        await guest.shows("test")
        for button in ("Cancel", "Clone", "Make a link"):
            await expect(guest.page.get_by_role("button", name=button)).to_have_count(0)
        await guest.go()
        await guest.shows("Shared with you")
        await guest.shows(jobs[0])
        await guest.go("jobs", jobs[1])
        await guest.shows("nothing else" if view[0] == "jobs" else "test")
