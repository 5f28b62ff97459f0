"""The page reports what has ended since the user last looked."""

from __future__ import annotations

import time

from playwright.async_api import expect

from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import Http

pytestmark = IN_BROWSER


async def test_what_ended_while_one_was_away_is_told_once(opened: Open, http: Http, store: Store) -> None:
    job = await http.job()
    tab = await opened(http.url)
    await tab.shows(job)
    told = tab.page.locator(".away")
    await expect(told).to_have_count(0)
    await store.transition(job, JobState.FAILED, reason="out of memory")
    await tab.page.goto(f"{http.url}/docs")  # where nobody looks at jobs
    await tab.page.evaluate(f"localStorage.setItem('opentinker-seen', '{time.time() - 7200:.0f}')")
    await tab.go()
    await expect(told).to_contain_text("1 failed")
    await expect(told).to_contain_text("out of memory")
    await told.get_by_role("button", name="Dismiss").click()
    await expect(told).to_have_count(0)


async def test_alarms_that_rang_meanwhile_are_told(opened: Open, http: Http, store: Store) -> None:
    job = await http.job()
    tab = await opened(http.url)
    await tab.shows(job)
    await store.update(
        job, event="collapse_alarm", detail={"metric": "entropy", "value": 0.01, "hint": "lower train.lr"}
    )
    await tab.page.goto(f"{http.url}/docs")
    await tab.page.evaluate(f"localStorage.setItem('opentinker-seen', '{time.time() - 7200:.0f}')")
    await tab.go()
    told = tab.page.locator(".away")
    await expect(told).to_contain_text("1 alarm")
    await expect(told).to_contain_text("entropy is 0.01; lower train.lr")


async def test_what_is_told_stays_until_it_is_dismissed(opened: Open, http: Http, store: Store) -> None:
    job = await http.job()
    tab = await opened(http.url)
    await tab.shows(job)
    told = tab.page.locator(".away")
    await store.transition(job, JobState.FAILED, reason="out of memory")
    # the same tab has been open all night
    await tab.page.evaluate(f"localStorage.setItem('opentinker-seen', '{time.time() - 7200:.0f}')")
    await expect(told).to_have_count(0)
    await tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await expect(told).to_contain_text("Since your last visit (2 h ago): 1 failed")
    await told.get_by_role("link").click()
    await expect(told).to_have_count(0)
    await tab.page.go_back()
    await expect(told).to_contain_text("1 failed")
    await tab.page.reload()
    await expect(told).to_contain_text("1 failed")
    await told.get_by_role("button", name="Dismiss").click()
    await tab.page.reload()
    await tab.shows(job)
    await expect(told).to_have_count(0)


async def test_a_list_that_is_not_whole_says_so(opened: Open, http: Http, store: Store) -> None:
    jobs = [await http.job() for _ in range(21)]
    for job in jobs:
        await store.update(job, event="collapse_alarm")
    tab = await opened(http.url)
    await tab.shows(jobs[0])
    await tab.page.evaluate(f"localStorage.setItem('opentinker-seen', '{time.time() - 7200:.0f}')")
    await tab.page.reload()
    await expect(tab.page.locator(".away")).to_contain_text("at least 20 alarm")
