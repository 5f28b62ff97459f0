"""Many jobs at a glance: grouped in the list, and as lines across their settings in a comparison."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
import pytest
from playwright.async_api import Route, expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer, reward, saved
from tests.support.api import SPEC, Http

pytestmark = IN_BROWSER


def spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


async def test_jobs_are_grouped_by_what_they_have_in_common(opened: Open, http: Http) -> None:
    for name in ("one", "two"):
        await http.job(spec(name=name, project="maths"))
    await http.job(spec(name="three"))
    tab = await opened(http.url)
    await tab.page.get_by_label("Group by").select_option("project")
    rows = tab.page.locator(".groups tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.first).to_contain_text("2 queued")
    await rows.get_by_role("button", name="maths").click()
    listed = tab.page.locator(".jobs tbody tr")
    await expect(listed).to_have_count(2)
    await tab.page.get_by_label("Group by").select_option("kind")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("rl")


async def test_columns_that_are_off_at_first_are_chosen_kept_and_sorted(opened: Open, http: Http, store: Store) -> None:
    ids = {}
    for name in ("one", "two"):
        ids[name] = await http.job(spec(name=name, notes=f"as {name} in\nthe paper, {'long ' * 40}"))
    await until(lambda: store.job(ids["two"]), lambda job: job.waiting_for)  # a change of it
    await http("POST", f"/v1/jobs/{ids['one']}/cancel")
    tab = await opened(http.url)
    heads = tab.page.locator(".jobs thead th")
    await expect(heads.filter(has_text="State")).to_have_count(1)
    chosen = ("Kind", "Notes", "Updated", "Finished")
    for name in chosen:
        await expect(heads.filter(has_text=name)).to_have_count(0)
    await tab.page.get_by_text("Columns", exact=True).click()
    for name in chosen:
        await tab.page.get_by_label(f"Column {name}").check()
    await tab.page.reload()
    first = tab.page.locator(".jobs tbody tr").first
    for name, top in (("Kind", "two"), ("Notes", "one"), ("Updated", "one"), ("Finished", "one")):
        await heads.get_by_role("button", name=name).click()
        await expect(heads.filter(has_text=name)).to_have_attribute("aria-sort", re.compile("ascending|descending"))
        await expect(first).to_contain_text(ids[top])
    cells = {name: first.locator(f'td[data-label="{name}"]') for name in chosen}
    await expect(cells["Kind"]).to_have_text("rl")
    await expect(cells["Notes"]).to_contain_text("as one in")
    for name in ("Updated", "Finished"):
        await expect(cells[name]).to_contain_text("s ago")
    other = tab.page.locator(".jobs tbody tr", has_text=ids["two"])
    await expect(other.locator('td[data-label="Finished"]')).to_be_empty()
    box = await first.bounding_box()
    assert box is not None and box["height"] <= 37, "long notes are one line"


async def test_compared_runs_are_lines_across_their_settings(opened: Open, http: Http, bus: Bus) -> None:
    jobs = []
    for tokens, mean in ((4, 0.2), (8, 0.9)):
        rollout = {**SPEC["rollout"], "max_tokens": tokens}
        job = await http.job(spec(rollout=rollout))
        await Trainer(bus, job).says(1, reward(mean))
        jobs.append(job)
    tab = await opened(http.url, "compare", ",".join(jobs))
    lines = tab.page.locator(".parallel polyline")
    await expect(lines).to_have_count(2)
    strengths = [float(await lines.nth(place).get_attribute("opacity") or 0) for place in range(2)]
    assert strengths[0] < strengths[1] == 1.0
    await expect(tab.page.locator(".parallel")).to_contain_text("rollout.max_tokens")
    won = tab.page.locator("table.compared tbody tr").filter(has=tab.page.get_by_title("best"))
    await expect(won).to_have_count(1)
    await expect(won.get_by_title("best").first).to_have_text("0.9 ★")
    scatter = tab.page.locator(".scatter", has_text="by rollout.max_tokens")
    for tick in ("4", "6", "8", "0.4", "0.8"):
        await expect(scatter.locator("text").filter(has_text=re.compile(f"^{tick}$"))).to_have_count(1)
    assert (await saved(tab, "by rollout.max_tokens as PNG")).startswith(b"\x89PNG")
    html = (await saved(tab, "HTML", exact=True)).decode()
    assert html.count("<circle") == 2 and html.count("<polyline") == 2 and "var(" not in html.split("<svg", 1)[1]
    assert (await saved(tab, "Curves as CSV")).decode().splitlines() == [
        "id,name,step,reward/mean,exact", f"{jobs[0]},test,1,0.2,0.1", f"{jobs[1]},test,1,0.9,0.45",
    ]  # fmt: skip


async def test_nobody_wins_in_a_metric_without_a_direction(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [await http.job(), await http.job()]
    for job, value in zip(jobs, (0.2, 0.9), strict=True):
        await Trainer(bus, job).says(1, {"entropy": value, "loss": value})
    tab = await opened(http.url, "compare", ",".join(jobs))
    table = tab.page.locator("table.compared")
    await expect(table.locator("th", has_text="entropy highest")).to_have_count(1)
    await expect(table.get_by_title("best")).to_have_text(["0.2 ★"] * 3)  # of the loss: best, last and area


async def test_seeds_are_grouped_and_metrics_chosen_and_removed(opened: Open, http: Http, bus: Bus) -> None:
    jobs = []
    for tokens, seed in ((4, 1), (4, 2), (8, 1)):
        rollout = {**SPEC["rollout"], "max_tokens": tokens, "seed": seed}
        jobs.append(await http.job(spec(rollout=rollout)))
        await Trainer(bus, jobs[-1]).says(1, {"entropy": tokens / 16, "loss": seed / 4})
    tab = await opened(http.url, "compare", ",".join(jobs))
    await tab.page.get_by_label("Group by").select_option(label="by all settings but seeds")
    await expect(tab.page.locator('[data-chart="loss"] .legend')).to_have_text(
        "max_tokens 4 (2) 0.375max_tokens 8 (1) 0.25"
    )
    scatter = tab.page.locator(".scatter", has_text="by rollout.max_tokens")
    await expect(scatter).to_contain_text("loss (last)")
    await tab.page.get_by_label("Settings against").select_option("entropy")
    await expect(scatter).to_contain_text("entropy (last)")
    await expect(tab.page.locator(".parallel")).to_contain_text("entropy")
    await tab.page.get_by_role("button", name="Remove loss").click()
    await expect(tab.page.locator("[data-chart]")).to_have_count(1)
    await expect(tab.page.locator("table.compared th", has_text="loss")).to_have_count(0)
    await expect(tab.page.get_by_role("button", name="Remove entropy")).to_have_count(0)


async def test_a_metric_with_a_comma_is_compared_and_older_links_still_work(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [await http.job(), await http.job()]
    odd = "val/task/algebra, level 1/reward"
    for job, value in zip(jobs, (0.2, 0.9), strict=True):
        await Trainer(bus, job).says(1, {"loss": value, "entropy": value, odd: value})
    tab = await opened(http.url, "compare", ",".join(jobs), "metrics%3Dloss%2Centropy")
    charts = tab.page.locator("[data-chart]")
    await expect(charts).to_have_count(2)
    await tab.page.get_by_role("button", name="Remove entropy").click()
    await expect(charts).to_have_count(1)
    await tab.page.get_by_label("Add a metric").select_option(odd)
    table = tab.page.locator("table.compared")
    for _ in range(2):
        await expect(charts).to_have_count(2)
        await expect(tab.page.locator(f'[data-chart="{odd}"] .key')).to_have_count(2)
        await expect(table.locator("th", has_text="algebra")).to_have_text(
            [f"{odd} {end}" for end in ("best", "last", "area")]
        )
        await tab.page.reload()
    await tab.page.get_by_role("button", name="Remove loss").click()
    await expect(charts).to_have_count(1)
    await expect(charts).to_have_attribute("data-chart", odd)


LINES = "all => all.map(one => getComputedStyle(one).backgroundColor)"


async def test_an_exported_comparison_says_which_line_is_which_run(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [await http.job(spec(name=name)) for name in ("=1+1", "<b>bold</b>")]
    for job, mean in zip(jobs, (0.2, 0.9), strict=True):
        await Trainer(bus, job).says(1, reward(mean))
    tab = await opened(http.url, "compare", ",".join(jobs), color_scheme="dark")
    await expect(tab.page.locator('[data-chart="reward/mean"] .key')).to_have_count(2)
    swatches = await tab.page.locator('[data-chart="reward/mean"] .key i').evaluate_all(LINES)
    card = await tab.page.locator("table.compared").evaluate("one => getComputedStyle(one).backgroundColor")
    lines = (await saved(tab, "reward/mean as CSV")).decode().splitlines()
    assert lines[0] == "step,'=1+1,<b>bold</b>", "no name is a formula"
    html = (await saved(tab, "HTML", exact=True)).decode()
    alone = await tab.page.context.new_page()
    await alone.set_content(html)
    chart = alone.locator("figure").filter(has=alone.locator("img")).filter(has_text="reward/mean")
    assert await chart.locator(".key i").evaluate_all(LINES) == swatches and swatches[0] != swatches[1]
    await expect(chart.locator(".key").nth(1)).to_have_text("<b>bold</b> 0.9")
    assert await alone.locator("body").evaluate("one => getComputedStyle(one).backgroundColor") == card
    table = alone.locator("table")
    await expect(table.locator("button")).to_have_count(0)
    assert await table.locator("th").count() == await table.locator("tbody tr").first.locator("td").count()
    links = await table.locator("a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert links == [f"{http.url}/#/jobs/{job}" for job in jobs]


async def test_a_run_looks_the_same_in_every_chart_and_too_many_are_said(
    opened: Open, http: Http, store: Store, bus: Bus
) -> None:
    jobs = [await store.create_job(id=f"j-{n:010}", spec=spec(name=f"run {n}"), tenant="default") for n in range(51)]
    for place, names in ((0, ["loss"]), (9, ["loss", "entropy"]), (50, ["loss", "entropy"])):
        await Trainer(bus, jobs[place]).says(1, dict.fromkeys(names, 0.5))
    tab = await opened(http.url, "compare", ",".join(jobs))
    await tab.shows("the first 50 of 51 jobs")
    sample = "n => getComputedStyle(n.querySelector('i')).background"
    looks = [
        await tab.page.locator(f'[data-chart="{chart}"] .key', has_text="run 9").evaluate(sample)
        for chart in ("loss", "entropy")
    ]
    first = await tab.page.locator('[data-chart="loss"] .key', has_text="run 0").evaluate(sample)
    assert looks[0] == looks[1] != first
    await tab.page.locator("summary", has_text="Share").click()
    await tab.page.get_by_role("button", name="Make a link").click()
    await expect(tab.page.get_by_label("Link")).to_have_value(re.compile("#/share/"))


async def test_episodes_of_two_runs_on_the_same_rows_stand_side_by_side(opened: Open, http: Http, ctx: Context) -> None:
    jobs = []
    for answer, rewards in (("seven", (1.0, 0.0)), ("eight", (0.0, 0.0))):
        job = await http.job()
        kept = ctx.settings.data_dir / "jobs" / job / "transcripts"
        kept.mkdir(parents=True)
        episodes = [
            {
                "index": state, "state": state, "sample": 0, "opponent": "random",
                "reward": reward, "metrics": {}, "ending": "env_done",
                "messages": [
                    {"role": "user", "content": f"row {state}"}, {"role": "assistant", "content": f"{answer} {state}"},
                ],
            }
            for state, reward in enumerate(rewards)
        ]  # fmt: skip
        (kept / "step-000001.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in episodes))
        jobs.append(job)
    tab = await opened(http.url, "compare", ",".join(jobs))
    await tab.page.locator(".pairs summary").click()
    rows = tab.page.locator(".pair-of")
    await expect(rows).to_have_count(2)
    await expect(rows.first).to_contain_text("seven 0")
    await expect(rows.first).to_contain_text("eight 0")
    await expect(rows.first.get_by_text("against random")).to_have_count(2)
    await tab.page.get_by_label("only where the rewards differ").check()
    await expect(rows).to_have_count(1)
    await tab.page.get_by_label("Left").select_option(jobs[1])
    await tab.page.get_by_label("Right").select_option(jobs[0])
    await expect(rows.first.locator("> div").first).to_contain_text("eight 0")
    other = await opened(http.url)
    await other.page.goto(tab.page.url)
    await expect(other.page.locator(".pair-of")).to_have_count(1)
    await expect(other.page.locator(".pair-of > div").first).to_contain_text("eight 0")


async def test_a_long_list_has_every_job_once(opened: Open, http: Http, store: Store) -> None:
    for number in range(450):
        await store.create_job(id=f"j-{number:010}", spec=spec(name=f"run {number}"), tenant="default")
    tab = await opened(http.url)
    count = tab.page.locator("p.count")
    for seen in (200, 400):
        await expect(count).to_contain_text(f"the first {seen} jobs")
        await tab.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    await expect(count).to_contain_text("450 jobs")
    await expect(count).not_to_contain_text("the first")


async def test_jobs_that_come_and_end_push_none_out_of_a_long_list(opened: Open, http: Http, store: Store) -> None:
    for number in range(250):
        await store.create_job(id=f"j-{number:010}", spec=spec(name=f"run {number}"), tenant="default")
    tab = await opened(http.url)
    count = tab.page.locator("p.count")
    await expect(count).to_contain_text("the first 200 jobs")
    bulk = tab.page.locator(".bulk")
    await tab.page.get_by_label("Select all").check()
    await expect(bulk).to_contain_text("all that are loaded, of 250")
    await tab.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    await expect(count).to_contain_text("250 jobs")
    await expect(bulk).to_contain_text("200 jobs selected")
    await expect(bulk).not_to_contain_text("loaded")
    await tab.page.get_by_label("Select all").check()
    await expect(bulk).to_contain_text("250 jobs selected")
    await expect(bulk).not_to_contain_text("loaded")
    for number in range(250, 260):
        await store.create_job(id=f"j-{number:010}", spec=spec(name=f"run {number}"), tenant="default")
    await store.transition("j-0000000000", JobState.CANCELLED)
    await expect(count).to_contain_text("260 jobs", timeout=20_000)
    await expect(bulk).to_contain_text("250 jobs selected")
    await tab.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    await expect(tab.page.locator(".jobs tbody tr", has_text="j-0000000000")).to_contain_text("cancelled")


async def test_all_jobs_that_a_filter_finds_are_selected_although_few_are_loaded(
    opened: Open, http: Http, store: Store
) -> None:
    for number in range(1250):
        project = "wanted" if number >= 10 else "other"
        job = spec(name=f"run {number}", project=project)
        await store.create_job(id=f"j-{number:010}", spec=job, tenant="default")
    tab = await opened(http.url, "jobs?project=wanted")
    bulk = tab.page.locator(".bulk")
    await tab.page.get_by_label("Select all").check()
    await expect(bulk).to_contain_text("200 jobs selected")
    await expect(bulk).to_contain_text("all that are loaded, of 1,240")
    await tab.page.get_by_role("button", name="Select all 1,240").click()
    await expect(bulk).to_contain_text("1240 jobs selected")
    await expect(bulk).not_to_contain_text("loaded")
    await expect(tab.page.locator("p.count")).to_contain_text("1240 jobs")
    await expect(tab.page.get_by_label("Select all")).to_be_checked()


@pytest.mark.parametrize("change", ["row", "head", "key"])
async def test_jobs_that_are_unselected_while_all_are_loaded_stay_so(
    opened: Open, http: Http, store: Store, change: str
) -> None:
    for number in range(250):
        await store.create_job(id=f"j-{number:010}", spec=spec(name=f"run {number}"), tenant="default")
    tab = await opened(http.url)
    bulk, head, arrived = tab.page.locator(".bulk"), tab.page.get_by_label("Select all"), asyncio.Event()
    await expect(tab.page.locator("p.count")).to_contain_text("the first 200 jobs")

    async def late(route: Route) -> None:
        await arrived.wait()
        await route.continue_()

    await tab.page.route("**/v1/jobs?*", late)
    await head.check()
    await tab.page.get_by_role("button", name="Select all 250").click()
    if change == "row":
        await tab.page.get_by_label("Select run 249").uncheck()
    elif change == "head":
        await head.uncheck()
    else:
        await tab.page.keyboard.press("a")
    arrived.set()
    await expect(tab.page.locator("p.count")).to_contain_text("250 jobs", timeout=20_000)
    # jobs that the page still wanted to select would be drawn as such in the next frames
    await tab.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    if change == "head":
        await expect(bulk).to_have_count(0)
    else:
        await expect(bulk).to_contain_text("199 jobs selected" if change == "row" else "200 jobs selected")
