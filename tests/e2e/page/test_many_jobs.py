"""Many jobs at a glance: grouped in the list, and as lines across their settings in a comparison."""

from __future__ import annotations

from typing import Any

import orjson
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer, reward
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


async def test_episodes_of_two_runs_on_the_same_rows_stand_side_by_side(opened: Open, http: Http, ctx: Context) -> None:
    jobs = []
    for answer, rewards in (("seven", (1.0, 0.0)), ("eight", (0.0, 0.0))):
        job = await http.job()
        kept = ctx.settings.data_dir / "jobs" / job / "transcripts"
        kept.mkdir(parents=True)
        episodes = [
            {
                "index": state, "state": state, "sample": 0, "reward": reward, "metrics": {}, "ending": "env_done",
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
    await tab.page.get_by_label("only where the rewards differ").check()
    await expect(rows).to_have_count(1)


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
