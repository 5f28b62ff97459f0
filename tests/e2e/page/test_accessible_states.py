"""States of views that are reached by clicks, or by data: no serious finding of axe-core either."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from playwright.async_api import expect

from opentinker.client import AsyncClient
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from tests.e2e.page.conftest import Open, Tab
from tests.e2e.page.running_jobs import Trainer, reward
from tests.e2e.page.test_accessibility import findings, pytestmark
from tests.e2e.page.test_evaluations_view import EVALUATED, evaluate
from tests.integration.client.test_evaluation_commands import VALUES
from tests.integration.rollout_worker.env_workers import Workers, workers
from tests.support.api import OPERATOR, SPEC, Http

__all__ = ["pytestmark", "workers"]
OF_LIBRARIES = {("API", "nested-interactive")}
"""Findings that are not ours: Swagger UI puts the link to an operation into the button that opens it."""
States = AsyncIterator[tuple[str, Tab]]


async def of_several_jobs(opened: Open, http: Http, bus: Bus) -> States:
    """Bring a tab into one state after the other; gives the name of each."""
    tab = await opened(http.url)
    page = tab.page
    jobs = [
        await http.job({**SPEC, "name": f"run {n}", "tags": [f"seed-{n}"], "train": {"steps": 5 + n}}) for n in range(3)
    ]
    for place, job in enumerate(jobs):
        for step in (1, 2):
            await Trainer(bus, job).says(step, reward(0.2 * (place + step)))
    await tab.go()
    await page.get_by_label("Select run 0").check()
    for panel in ("Filters", "Columns"):
        await page.locator("summary", has_text=panel).click()
        yield f"jobs, some selected, {panel} open", tab
    await tab.go("compare", ",".join(jobs), "by=train.steps&open=1")
    await expect(page.locator(".pairs[open]")).to_have_count(1)
    await page.locator("summary", has_text="Share").click()
    await page.get_by_role("button", name="Make a link").click()
    link = await page.get_by_label("Link").input_value()
    yield "compare, grouped, pairs and share open", tab
    id = (await http("POST", "/v1/sweeps", json={**SPEC, "sweep": {"parameters": {"rollout.toy.skill": [0.5, 1.0]}}}))[
        1
    ]["id"]
    trials = [
        {
            "number": n, "settings": {"rollout.toy.skill": n}, "state": "finished" if n < 2 else "stopped",
            "reason": "", "value": n / 2, "created": 1.0, "finished": 2.0,
            "jobs": [{"id": jobs[n], "seed": n, "state": "succeeded", "step": 3, "value": n / 2}],
        }
        for n in range(3)
    ]  # fmt: skip
    swept = {
        **(await http("GET", f"/v1/sweeps/{id}"))[1],
        "all_trials": trials,
        "best": trials[1],
        "importance": {"rollout.toy.skill": 1.0},
    }
    await page.route(f"**/v1/sweeps/{id}", lambda route: route.fulfill(json=swept))
    await tab.go("sweeps", id)
    await page.locator(".chart").wait_for()
    yield "a sweep with trials", tab
    guest = await opened(http.url, key="")
    await guest.page.goto(link)
    await guest.page.reload()
    await guest.shows("shared with you")
    yield "a share link", guest


async def of_one_thing(opened: Open, http: Http, ctx: Context) -> States:
    tab = await opened(http.url)
    page = tab.page
    await evaluate(ctx.store, await http.job(), 4, VALUES)
    await tab.go("jobs", EVALUATED)
    await page.get_by_role("region", name="Result").wait_for()
    yield "a result of an evaluation", tab
    serves = {"name": "chat", "kind": "inference", "model": {"base": "some/model"}}
    await tab.go("jobs", await http.job(serves), "chat")
    await expect(page.locator("main textarea, main input").first).to_be_visible()
    yield "chat", tab
    report: Any = {
        "environment": "harbor:mine", "verdict": "1 of 2 tasks fails", "errors": ["b: no"], "advice": ["c"],
        "facts": {"start": "70 ms"}, "transcript": "said", "columns": ["task", "solution"], "rows": [["a", "1"]],
    }  # fmt: skip
    async with AsyncClient(http.url, api_key=OPERATOR) as client:
        await client.save_check(report)
    await tab.go("environments")
    await page.get_by_role("link", name="harbor:mine").click()
    await tab.shows("70 ms")
    yield "a check", tab
    await tab.go("environment", "copy_digits")
    await page.get_by_role("button", name="Begin").click()
    await page.get_by_label("Your answer").wait_for()
    yield "a play", tab
    await page.get_by_role("button", name="End").click()
    await page.goto(f"{http.url}/docs")
    await page.get_by_placeholder("Filter by tag").wait_for()
    yield "API", tab


async def test_states_of_views_can_be_used_by_everybody(
    opened: Open, http: Http, bus: Bus, ctx: Context, workers: Workers
) -> None:
    await workers.start("env-0")
    found = {}
    for states in (of_several_jobs(opened, http, bus), of_one_thing(opened, http, ctx)):
        async for name, tab in states:
            if wrong := [one for one in await findings(tab) if (name, one.split(": ")[1]) not in OF_LIBRARIES]:
                found[name] = wrong
    assert found == {}
