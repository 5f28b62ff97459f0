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
        await guest.shows("API key required")
        await guest.page.goto(link)  # in this tab: only what stands behind the # changes
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


async def test_a_link_takes_the_place_of_another_in_its_tab(opened: Open, http: Http) -> None:
    jobs = [await http.job() for _ in range(2)]
    shares = [await http("POST", "/v1/shares", json={"jobs": [job]}) for job in jobs]
    (_, first), (_, second) = shares
    guest = await opened(http.url, key="")
    await guest.page.goto(f"{http.url}{first['address']}")
    await guest.shows("shared with you")
    await guest.go("jobs", jobs[1])
    await guest.shows(f"this link shows {jobs[0]} and nothing else")
    await guest.page.goto(f"{http.url}{second['address']}")
    await expect(guest.page.get_by_role("heading", level=1)).to_have_text("test")
    await expect(guest.page).to_have_url(f"{http.url}/#/jobs/{jobs[1]}")
