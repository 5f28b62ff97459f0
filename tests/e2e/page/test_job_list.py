"""Lists of the page: jobs by project, tag and order, picked together; checks of environments; the HTTP API."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import expect

from opentinker.client import AsyncClient
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.state.store import Store
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer, reward, saved
from tests.support.api import OPERATOR, SPEC, Http
from tests.support.factories import make_spec

pytestmark = IN_BROWSER


async def test_checks_of_environments_are_listed_and_opened(opened: Open, http: Http) -> None:
    report: Any = {
        "environment": "harbor:mine", "verdict": "1 of 2 tasks cannot be trained yet", "errors": ["b: it is <flaky>"],
        "advice": [], "facts": {"start": "70 ms"}, "transcript": "", "columns": ["task", "solution"],
        "rows": [["a", "1"], ["b", "0.5"]],
    }  # fmt: skip
    async with AsyncClient(http.url, api_key=OPERATOR) as client:
        await client.save_check(report)
    tab = await opened(http.url, "environments")
    await tab.page.get_by_role("link", name="harbor:mine").click()
    for text in ("1 of 2 tasks cannot be trained yet", "b: it is <flaky>", "70 ms", "0.5"):
        await tab.shows(text)


async def test_the_http_api_is_read_and_tried_in_the_page(opened: Open, http: Http) -> None:
    tab = await opened(http.url)
    await tab.page.goto(f"{http.url}/docs")
    await expect(tab.page.locator(".swagger-ui .info .title")).to_contain_text("OpenTinker")
    await tab.page.get_by_placeholder("Filter by tag").wait_for()
    operation = tab.page.locator(".opblock", has_text="/v1/whoami").first
    await operation.locator(".opblock-summary-control").click()
    await operation.get_by_role("button", name="Try it out").click()
    await operation.get_by_role("button", name="Execute").click()
    await expect(operation.locator(".live-responses-table .microlight").first).to_contain_text('"role"')


async def test_jobs_are_listed_by_project_tag_and_order(opened: Open, http: Http) -> None:
    named = {"a-first": ["small"], "b-second": ["small", "seed 2"], "c-third": []}
    for name, tags in named.items():
        await http.job({**SPEC, "name": name, "project": "maths" if tags else "", "tags": tags})
    tab = await opened(http.url)
    rows, bar = tab.page.locator(".jobs tbody tr"), tab.page.locator(".bar")
    await expect(rows.first).to_contain_text("c-third")
    await tab.page.get_by_label("Order").select_option("name")
    await expect(rows.first).to_contain_text("a-first")
    await rows.first.get_by_role("button", name="maths").click()
    await expect(rows).to_have_count(2)
    await rows.nth(1).get_by_role("button", name="seed 2").click()
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("b-second")
    await bar.get_by_role("button", name="tag: seed 2").click()
    await expect(rows).to_have_count(2)
    await bar.get_by_role("button", name="project: maths").click()
    await expect(rows.nth(2)).to_contain_text("c-third")


async def test_the_address_holds_the_list_of_jobs(opened: Open, http: Http) -> None:
    for name, kept in (("a", {"name": "copy_digits"}), ("b", {"name": "copy_digits"}), ("c", {"name": "gsm8k"})):
        await http.job({**SPEC, "name": name, "environment": kept})
    tab = await opened(http.url)
    await tab.page.set_viewport_size({"width": 1400, "height": 900})  # with room for the environments
    await tab.page.reload()
    rows, heads = tab.page.locator(".jobs tbody tr"), tab.page.locator(".jobs thead")
    await heads.get_by_role("button", name="Job").click()
    await expect(rows.first).to_contain_text("a")
    await heads.get_by_role("button", name="Job").click()
    await expect(tab.page.locator("th", has_text="Job")).to_have_attribute("aria-sort", "descending")
    await expect(rows.first).to_contain_text("gsm8k")
    await tab.page.locator("summary", has_text="Filters").click()
    await tab.page.get_by_label("Filter by environment").select_option("copy_digits")
    await expect(rows).to_have_count(2)
    await tab.page.reload()
    other = await opened(http.url)
    await other.page.goto(tab.page.url)
    for one in (tab, other):
        await expect(one.page.locator(".jobs tbody tr")).to_have_count(2)
        await expect(one.page.locator(".jobs tbody tr").first).to_contain_text("b")
        await expect(one.page.get_by_role("button", name="environment: copy_digits")).to_have_count(1)
    await tab.page.get_by_label("Search jobs").fill("no such job")
    await tab.page.get_by_role("button", name="Clear the filters").click()
    await expect(rows).to_have_count(3)
    await rows.first.get_by_role("button", name="gsm8k").click()
    await expect(rows).to_have_count(1)
    await tab.page.get_by_label("Group by").select_option("kind")
    await tab.page.reload()
    await expect(tab.page.locator(".groups tbody tr")).to_contain_text("rl")
    await tab.page.get_by_role("link", name="Jobs", exact=True).click()
    await expect(rows).to_have_count(3)


async def test_a_job_is_named_tagged_and_noted_on_its_page(opened: Open, http: Http) -> None:
    job = await http.job({**SPEC, "name": "first", "tags": ["small"]})
    tab = await opened(http.url, "jobs", job)
    form = tab.page.locator("form.fields")
    await tab.page.get_by_role("button", name="Edit name, project, tags, notes").click()
    for field, text in (
        ("Name", "better"),
        ("Project", "maths"),
        ("Tags", "small, seed 2"),
        ("Notes", "lr of J\nworks"),
    ):
        await form.get_by_label(field).fill(text)
    await form.get_by_role("button", name="Save").click()
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("better")
    labels = tab.page.locator(".labels")
    await expect(labels.locator(".tag")).to_have_text(["small", "seed 2"])
    await expect(labels).to_contain_text("maths")
    await expect(labels.locator(".prose")).to_have_text("lr of J\nworks")
    found = (await http("GET", f"/v1/jobs/{job}"))[1]
    assert (found["name"], found["project"], found["tags"], found["notes"]) == (
        "better", "maths", ["small", "seed 2"], "lr of J\nworks",
    )  # fmt: skip
    await tab.page.get_by_role("button", name="Edit name").click()
    await form.get_by_label("Tags").fill("x" * 51)
    await form.get_by_role("button", name="Save").click()
    await expect(tab.page.get_by_role("alert")).to_contain_text("at most 50 characters")
    await tab.page.get_by_role("button", name="Discard").click()
    await expect(labels.locator(".tag")).to_have_count(2)


async def test_jobs_are_picked_by_mouse_and_keys_and_done_with_together(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [
        await http.job({**SPEC, "name": name, "train": {"steps": steps}})
        for name, steps in (("a", 5), ("b", 7), ("c", 7))
    ]
    for job, mean in zip(jobs, (0.25, 0.5, 0.75), strict=True):
        for step in (1, 2):
            await Trainer(bus, job).says(step, reward(mean * step / 2))
    tab = await opened(http.url)
    await tab.page.get_by_label("Order").select_option("name")
    rows, bulk = tab.page.locator(".jobs tbody tr"), tab.page.get_by_role("toolbar", name="Selected jobs")
    assert all(
        box is not None and box["height"] <= 36.5 for box in [await rows.nth(n).bounding_box() for n in range(3)]
    )
    await tab.page.get_by_label("Select a", exact=True).check()
    await tab.page.get_by_label("Select c", exact=True).click(modifiers=["Shift"])
    await expect(bulk).to_contain_text("3 jobs selected")
    await bulk.get_by_label("Tag to add").fill("mine")
    await bulk.get_by_label("Tag to add").press("Enter")
    await expect(rows.filter(has_text="mine")).to_have_count(3)
    await tab.page.locator("body").click(position={"x": 2, "y": 2})
    for key in ("j", "x", "j", "x", "?"):
        await tab.page.keyboard.press(key)
    await expect(bulk).to_contain_text("2 jobs selected")
    await tab.shows("c compares")
    await tab.page.keyboard.press("a")
    await tab.page.keyboard.press("c")
    await tab.page.wait_for_url("**/#/compare/**")
    table = tab.page.locator("table.compared")
    await expect(table.locator("thead")).to_contain_text("train.steps")
    await expect(table.locator("tbody tr").first).to_contain_text("0.25")
    await expect(tab.page.locator('[data-chart="reward/mean"] .legend')).to_have_text(re.compile("^a .*b .*c "))
    await tab.page.get_by_label("Group by").select_option("train.steps")
    await expect(tab.page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("7 (2)")
    other = await opened(http.url)
    await other.page.goto(tab.page.url)
    await expect(other.page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("7 (2)")
    text = (await saved(tab, "CSV", exact=True)).decode()
    assert text.splitlines()[0].startswith("id,name,train.steps,reward/mean best") and len(text.splitlines()) == 4
    text = (await saved(tab, "HTML")).decode()
    assert "data:image/png" in text and "7 (2)" in text and "<script" not in text
    await tab.go("compare", f"{jobs[0]},j-missing")
    await tab.shows("no job 'j-missing'")
    await expect(table.locator("tbody tr")).to_have_count(1)
    await tab.go()
    await tab.page.get_by_label("Select all").check()
    await tab.page.keyboard.press("Escape")
    await expect(bulk).to_have_count(0)
    await tab.page.keyboard.press("a")
    refused = {"detail": "it is busy", "status": 409}
    await tab.page.route(f"**/v1/jobs/{jobs[0]}/cancel", lambda route: route.fulfill(status=409, json=refused))
    await bulk.get_by_role("button", name="Cancel").click()
    await expect(rows.filter(has_text="cancelled")).to_have_count(2)
    await expect(bulk).to_contain_text("1 of 3 refused and still selected: it is busy")
    await expect(bulk).to_contain_text("1 job selected")


async def test_every_action_on_the_list_has_a_key(opened: Open, http: Http) -> None:
    jobs = {await http.job({**SPEC, "name": name}) for name in ("first", "second")}
    tab = await opened(http.url)
    rows, keyboard = tab.page.locator(".jobs tbody tr"), tab.page.keyboard
    await expect(rows).to_have_count(2)
    await keyboard.press("a")
    for key in ("t", *"mine", "Enter"):
        await keyboard.press(key)
    await expect(rows.filter(has_text="mine")).to_have_count(2)
    await keyboard.press("Escape")
    for key in ("j", "x", "s"):
        await keyboard.press(key)
    await expect(rows.filter(has_text="cancelled")).to_have_count(1)
    await tab.page.route("**/artifacts", lambda route: route.fulfill(json={"bytes": 0}))
    await keyboard.press("a")
    await keyboard.press("d")
    await expect(tab.page.get_by_role("toolbar", name="Selected jobs")).to_have_count(0)
    over = {id for id in jobs if (await http("GET", f"/v1/jobs/{id}"))[1]["state"] == "cancelled"}
    asked = [url for url in tab.asked if url.endswith("/artifacts")]
    assert asked == [f"{http.url}/v1/jobs/{id}/artifacts" for id in over]
    for key, heading in (("e", "Environments"), ("m", "Models"), ("c", "Cluster"), ("w", "Sweeps"), ("j", "Jobs")):
        await keyboard.press("g")
        await keyboard.press(key)
        await expect(tab.page.locator("h1")).to_have_text(heading)


@pytest.mark.parametrize("width", [375, 800, 1100, 1280, 1400, 1920])
async def test_the_list_is_no_wider_than_the_window(opened: Open, http: Http, bus: Bus, width: int) -> None:
    name = "A name for people, of some sixty letters: learning rate 0.0001"
    job = await http.job({**SPEC, "name": name, "tags": ["a tag of some letters", "seed-1"], "project": "maths"})
    for step in (1, 2):
        await Trainer(bus, job).says(step, reward(0.123456))
    tab = await opened(http.url, viewport={"width": width, "height": 700})
    await expect(tab.page.locator(".jobs tbody tr")).to_have_count(1)
    assert await tab.page.evaluate("document.documentElement.scrollWidth") <= width
    link = await tab.page.get_by_role("link", name=name).bounding_box()
    assert link is not None and link["width"] >= 150


async def test_of_many_jobs_those_in_sight_are_drawn(opened: Open, http: Http, store: Store) -> None:
    for n in range(450):
        await store.create_job(
            id=f"j-{n:010}", spec=make_spec(name=f"job {n}").model_dump(mode="json"), tenant="default"
        )
    tab = await opened(http.url)
    rows = tab.page.locator(".jobs tbody tr:not(.space)")
    await tab.shows("the first 200 jobs")
    await tab.page.get_by_role("button", name="More jobs").dispatch_event("click")  # without a scroll, which asks too
    await tab.shows("the first 400 jobs")
    assert await rows.count() < 100
    await tab.page.evaluate("window.scrollTo(0, 36 * 300)")
    await expect(rows.filter(has_text="job 150")).to_have_count(1)
    assert await rows.count() < 100
    await tab.page.get_by_label("Search jobs").fill("job 449")
    await expect(rows).to_have_count(1)
