"""The views of sweeps: how far each is, its trials with their values, which settings matter, and its jobs compared."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import expect

from opentinker.shared.state.store import Store
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.sweeps import Undelivered
from tests.conftest import until
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import SPEC, Http

pytestmark = IN_BROWSER
SKILLS = [0.25, 1.0]


def trial(number: int, job: str, value: float) -> dict[str, Any]:
    """A trial that has finished."""
    jobs = [{"id": job, "seed": 2, "state": "succeeded", "step": 3, "value": value}]
    settings = {"rollout.toy.skill": SKILLS[number]}
    times = {"created": 1.0, "finished": 2.0}
    return {
        "number": number,
        "settings": settings,
        "state": "finished",
        "reason": "",
        "value": value,
        "jobs": jobs,
        **times,
    }


async def test_a_sweep_shows_its_trials_what_matters_and_its_jobs_compared(opened: Open, http: Http) -> None:
    jobs = [await http.job({**SPEC, "name": name}) for name in ("worse", "better")]
    swept = {**SPEC, "name": "which skill", "sweep": {"metric": "exact", "parameters": {"rollout.toy.skill": SKILLS}}}
    id = (await http("POST", "/v1/sweeps", json=swept))[1]["id"]
    trials = [trial(number, job, value) for number, (job, value) in enumerate(zip(jobs, SKILLS, strict=True))]
    stopped = {
        **trial(0, "", 0.0),
        "number": 2,
        "state": "stopped",
        "value": None,
        "jobs": [],
        "reason": "below the median",
    }
    ended = {
        **(await http("GET", f"/v1/sweeps/{id}"))[1],
        "state": "succeeded", "trials": {"finished": 2, "stopped": 1}, "planned": 3,
        "all_trials": [*trials, stopped], "best": trials[1], "finished": 2.0,
        "importance": {"rollout.toy.skill": 0.75},
    }  # fmt: skip
    tab = await opened(http.url, "sweeps")
    row = tab.page.locator("tbody tr", has_text="which skill")
    await expect(row).to_contain_text("maximize exact")
    await tab.page.route(f"**/v1/sweeps/{id}", lambda route: route.fulfill(json=ended))
    await row.get_by_role("link").click()
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("which skill")
    await expect(tab.page.locator(".progress").first).to_contain_text("3 / 3")
    await expect(tab.page.locator("tr", has=tab.page.get_by_label("share of rollout.toy.skill"))).to_contain_text("75%")
    await expect(tab.page.locator(".facts")).to_contain_text("best so far1 of trial 1: skill 1")
    await expect(tab.page.locator('[data-chart="exact by finished trials"] .legend')).to_contain_text("best so far 1")
    await expect(tab.page.locator("tr", has_text="stopped")).to_contain_text("below the median")
    best = tab.page.locator("tr", has_text="best")
    await expect(best).to_contain_text(f"{jobs[1]} (seed 2: 1)")
    await expect(
        tab.page.locator("section", has_text="Trials, the best first").locator("tbody tr").first
    ).to_contain_text("best")
    await tab.page.locator("summary", has_text="Share").click()
    await tab.page.get_by_role("button", name="Make a link").click()
    guest = await opened(http.url, key="")
    await guest.page.goto(await tab.page.get_by_label("Link").input_value())
    await guest.page.reload()
    await expect(guest.page.locator("table.compared tbody tr")).to_have_count(2)
    await tab.page.get_by_role("link", name="Compare its jobs").click()
    await tab.page.wait_for_url(f"**/#/compare/{jobs[1]},{jobs[0]}**")
    await expect(tab.page.locator("table.compared tbody tr").first).to_contain_text("better")


async def test_a_sweep_shows_the_messages_that_were_given_up(opened: Open, http: Http, store: Store) -> None:
    swept = {**SPEC, "sweep": {"parameters": {"rollout.toy.skill": SKILLS}}}
    id = (await http("POST", "/v1/sweeps", json=swept))[1]["id"]
    for occasion, entry, error in (("target", 1, "answered 503: <b>away</b>"), ("failed", 0, "timed out")):
        given_up = Undelivered(time=1.5, occasion=occasion, entry=entry, tries=9, error=error)
        await SweepStore(store.redis).add_undelivered(id, given_up)
    tab = await opened(http.url, "sweeps", id)
    await expect(tab.page.locator("p", has_text="not delivered")).to_have_text([
        "Message target to notify.1 not delivered: answered 503: <b>away</b>",
        "Message failed to notify.0 not delivered: timed out",
    ])  # fmt: skip


async def test_sweeps_are_found_by_their_labels_which_are_changed_here(opened: Open, http: Http) -> None:
    made = []
    for name, labels in (("one", {"project": "maths", "tags": ["base"]}), ("two", {"notes": "second seed"})):
        swept = {**SPEC, **labels, "name": name, "sweep": {"parameters": {"rollout.toy.skill": SKILLS}}}
        made.append((await http("POST", "/v1/sweeps", json=swept))[1]["id"])
    tab = await opened(http.url, "sweeps")
    rows = tab.page.locator("tbody tr")
    await expect(rows).to_have_count(2)
    await tab.page.get_by_role("button", name="maths").click()
    await expect(rows).to_have_count(1)
    await tab.page.wait_for_url("**/#/sweeps?project=maths")
    await tab.page.get_by_role("button", name="project: maths").click()
    await tab.page.get_by_label("Search sweeps").fill("second")
    await expect(rows).to_have_count(1)
    await rows.get_by_role("link", name="two").click()
    await expect(tab.page.locator(".labels .prose")).to_have_text("second seed")
    await tab.page.get_by_role("button", name="Edit name, project, tags, notes").click()
    await tab.page.get_by_label("Name", exact=True).fill("the second")
    await tab.page.get_by_label("Tags, separated").fill("late, odd")
    await tab.page.get_by_role("button", name="Save").click()
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("the second")
    _, changed = await http("GET", f"/v1/sweeps/{made[1]}")
    assert (changed["name"], changed["tags"], changed["notes"]) == ("the second", ["late", "odd"], "second seed")
    await tab.page.goto(f"{http.url}/#/sweeps?by=project")
    groups = tab.page.locator(".groups tbody tr")
    await expect(groups).to_have_text(["none11 running", "maths11 running"])
    await tab.page.get_by_label("Group by").select_option("tag")
    await tab.page.wait_for_url("**/#/sweeps?by=tag")
    await expect(groups).to_have_count(3)
    await groups.get_by_role("button", name="late").click()
    await tab.page.wait_for_url("**/#/sweeps?tag=late")
    await expect(rows).to_have_count(1)
    await tab.page.get_by_text("Filters", exact=True).click()
    await tab.page.get_by_label("Filter by tag").select_option("")
    await expect(rows).to_have_count(2)
    await tab.page.get_by_label("Filter by project").select_option("maths (1)")
    await expect(rows).to_have_count(1)
    await tab.page.goto(f"{http.url}/#/sweeps?tag=nothing")
    await tab.page.get_by_role("button", name="Clear the filters").click()
    await expect(rows).to_have_count(2)


@pytest.mark.parametrize("noun", ["jobs", "sweeps"])
async def test_what_is_typed_is_asked_for_at_once_and_then_in_the_next_pause(
    opened: Open, http: Http, noun: str
) -> None:
    await http.job({**SPEC, "name": "some job"})
    swept = {**SPEC, "name": "some sweep", "sweep": {"parameters": {"rollout.toy.skill": SKILLS}}}
    await http("POST", "/v1/sweeps", json=swept)
    tab = await opened(http.url, *(["sweeps"] if noun == "sweeps" else []))
    await expect(tab.page.locator("tbody tr")).not_to_have_count(0)
    await tab.page.clock.install()
    await tab.page.reload()
    await expect(tab.page.locator("tbody tr")).not_to_have_count(0)
    await tab.page.clock.pause_at(datetime.now() + timedelta(days=1))

    def searched() -> list[str]:
        queries = [parse_qs(urlsplit(url).query) for url in tab.asked if f"/v1/{noun}?" in url]
        return [query["search"][0] for query in queries if "search" in query]

    await tab.page.get_by_label(f"Search {noun}").focus()
    for key in "some x":
        await tab.page.keyboard.press(key)
        await tab.page.clock.run_for(50)
    await until(searched, lambda found: found == ["s"])
    await tab.page.clock.run_for(400)
    await until(searched, lambda found: found == ["s", "some x"])
