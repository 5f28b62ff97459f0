"""Curves and timelines of jobs in a real browser."""

from __future__ import annotations

import re
import time

import orjson
import pytest
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.telemetry import Segment, TimelinePart
from tests.conftest import WAIT_S, until
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer, reward, saved, value
from tests.support.api import Http

pytestmark = IN_BROWSER


PAINTED = """() => {
  const canvas = document.querySelector('[data-chart="Reward"] canvas');
  if (!canvas) return 0;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return data.filter((value, at) => at % 4 === 3 && value > 0).length;
}"""


async def test_curves_mark_where_the_job_went_back(opened: Open, http: Http, store: Store, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 31):
        await trainer.says(step, reward(0.25))
    tab = await opened(http.url, "jobs", job)
    plot = tab.page.locator('[data-chart="Reward"] .plot')
    await expect(plot).not_to_have_attribute("aria-label", re.compile("from step"))
    before = await until(lambda: tab.page.evaluate(PAINTED))
    detail = {"from": 30, "to": 12, "alarm": "reward_cliff", "rewind": 1, "removed": [20, 30]}
    await store.update(job, event="rewound", detail=detail)
    await tab.page.reload()
    await tab.shows("The job went back (dotted lines): from step 30 to 12 (reward_cliff).")
    await expect(plot).to_have_attribute("aria-label", re.compile(r"from step 30 to 12 \(reward_cliff\)"))
    await until(lambda: tab.page.evaluate(PAINTED), lambda after: after > before)


async def test_curves_are_those_of_the_job_and_go_on(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 31):
        await trainer.says(step, reward(0.25))
    tab = await opened(http.url, "jobs", job)
    await expect(value(tab, "Reward")).to_have_text("0.25")
    await expect(value(tab, "Success")).to_have_text("0.125")
    for step in range(31, 61):
        await trainer.says(step, reward(0.75))
    await expect(value(tab, "Reward")).to_have_text("0.75")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert lines[0] == "step,reward" and lines[1] == "1,0.25" and lines[60] == "60,0.75"
    assert (await saved(tab, "Reward as PNG")).startswith(b"\x89PNG")


@pytest.mark.nightly
async def test_ten_thousand_points_are_drawn(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 10_001):
        await trainer.says(step, reward((step % 100) / 100))
    tab = await opened(http.url)
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    await tab.page.wait_for_function(paint)
    await tab.go("jobs", job)
    await expect(tab.page.locator('[data-chart="Reward"] .tools small')).to_have_text(
        "step 10.0k", timeout=WAIT_S * 1000
    )
    drawn = """async () => {
        const began = performance.now();
        document.querySelector('[aria-label="smooth"] button:last-child').click();
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        return performance.now() - began;
    }"""
    took = [await tab.page.evaluate(drawn), await tab.page.evaluate(paint)]
    print(f"all charts anew in {took[0]:.0f} ms, first paint after {took[1]:.0f} ms", end=" ")
    assert max(took) < 10_000


async def test_an_eval_jobs_result_stands_on_its_page_and_in_the_list(opened: Open, http: Http, store: Store) -> None:
    spec = parse_spec({"name": "judge", "kind": "eval", "model": {"base": "m"}, "environment": {"name": "bandit"}})
    job = "j-0123456789"
    await store.create_job(id=job, spec=spec.model_dump(mode="json"), tenant="default")
    values = {"val/reward/mean": 0.5, "val/reward/low": 0.4, "val/reward/high": 0.6, "val/pass/1": 0.891}
    result = {"version": "1.197", "step": 197, "values": values}
    progress = {"val/reward/mean": 0.5, "val/pass/1": 0.891}
    await store.update(job, result=orjson.dumps(result).decode(), progress=orjson.dumps(progress).decode())
    tab = await opened(http.url)
    await expect(tab.page.locator("tr", has_text=job)).to_contain_text("val/pass/1 0.891")
    await tab.go("jobs", job)
    card = tab.page.get_by_role("region", name="Result")
    await expect(card).to_contain_text("weights 1.197")
    await expect(card.locator("tr", has_text="reward/mean")).to_contain_text("0.5" + "0.4 to 0.6")
    await expect(card.locator("tr", has_text="pass/1")).to_contain_text("0.891")


async def test_curves_open_as_they_were_measured(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step, mean in enumerate((0.0, 0.0, 1.0), 1):
        await trainer.says(step, {**reward(mean), "lr": mean})
    tab = await opened(http.url, "jobs", job)
    await expect(tab.page.get_by_role("group", name="smooth").get_by_role("button", pressed=True)).to_have_text("off")
    await expect(value(tab, "Reward")).to_have_text("1")


async def test_steps_that_were_rolled_back_are_gone(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 11):
        await trainer.says(step, reward(0.5))
    await Trainer(bus, job, "trainer-again").says(4, reward(0.9))
    tab = await opened(http.url, "jobs", job)
    await expect(value(tab, "Reward")).to_have_text("0.9")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4"]


@pytest.mark.nightly
async def test_what_a_worker_did_while_its_messages_were_lost_is_not_known(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    for seq in (0, 1, 4, 5):
        segments = [Segment(lane="training", kind="step", start=1000.0 + seq, end=1000.8 + seq)]
        part = TimelinePart(job=job, worker="trainer-0", incarnation="one", seq=seq, segments=segments)
        await bus.emit(TIMELINE, part, job=job, worker="trainer-0")
    tab = await opened(http.url, "jobs", job, "timeline")
    await tab.shows("2 lost.")
    lanes = tab.page.locator(".timeline canvas")
    await lanes.press("ArrowUp")
    await lanes.press("ArrowLeft")
    await expect(tab.page.locator(".chosen")).to_contain_text("training of trainer-0: step 800 ms")


async def test_the_timeline_says_where_the_time_goes(opened: Open, http: Http, bus: Bus, store: Store) -> None:
    job, now = await http.job(), time.time()
    await store.update(job, created=now - 60.0, finished=now)  # however late the page asks
    segments = [Segment(lane="training", kind="step", start=now - 48.0, end=now - 15.0)]
    part = TimelinePart(job=job, worker="trainer-0", incarnation="one", seq=0, segments=segments)
    await bus.emit(TIMELINE, part, job=job, worker="trainer-0")
    await Trainer(bus, job).says(1, {**reward(0.0), "zero_variance": 1.0})
    tab = await opened(http.url, "jobs", job, "timeline")
    card = tab.page.get_by_label("Where the time goes")
    await expect(card.locator("tr")).to_have_text(["training55 %", "no worker was working on it45 %"])
    await expect(card).to_contain_text("all rewards are equal: nothing is learned from them")


async def test_many_env_workers_are_one_lane_until_it_is_opened(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    for number in range(8):
        segments = [Segment(lane="env", kind="turn", start=1000.0 + number, end=1004.0 + number, level=2.0)]
        part = TimelinePart(job=job, worker=f"env-{number}", incarnation="one", seq=0, segments=segments)
        await bus.emit(TIMELINE, part, job=job, worker=f"env-{number}")
    tab = await opened(http.url, "jobs", job, "timeline")
    rows, fold = tab.page.locator(".timeline li"), tab.page.get_by_role("button", name="env: show each worker")
    await expect(rows).to_have_text(re.compile(r"env 8 workers\d+%"))
    await tab.page.locator(".timeline canvas").press("ArrowLeft")
    await expect(tab.page.locator(".chosen")).to_contain_text(re.compile(r"env of 8 workers: turn \d+ ms, \d\.\d at"))
    await fold.click()
    await expect(rows).to_have_count(8)
    await expect(rows.last).to_contain_text("env-7")
    await fold.click()
    await expect(rows).to_have_count(1)


async def test_two_runs_are_compared(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [await http.job(), await http.job()]
    for job, mean in zip(jobs, (0.25, 0.75), strict=True):
        await Trainer(bus, job).says(1, reward(mean))
    tab = await opened(http.url, "jobs", jobs[0])
    await expect(value(tab, "Reward")).to_have_text("0.25")
    await tab.page.get_by_label("Compare with").fill(jobs[1])
    await expect(tab.page.locator('[data-chart="Reward"] .legend')).to_contain_text(f"{jobs[1]} 0.75")
