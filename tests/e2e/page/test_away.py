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
