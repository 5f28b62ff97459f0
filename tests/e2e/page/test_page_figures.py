"""The page stays fast with the data of a year of research: 5,000 jobs in the list, twenty long runs compared."""

from __future__ import annotations

import time

import pytest
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.state.store import Store
from tests.conftest import Figure
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer
from tests.support.api import Http
from tests.support.factories import make_spec

pytestmark = [*IN_BROWSER, pytest.mark.nightly]
JOBS, RUNS, POINTS = 5000, 20, 1000
FRAMES = """() => new Promise((done) => {
  const gaps = []; let last = performance.now(), left = 120;
  const step = (now) => {
    gaps.push(now - last); last = now; window.scrollBy(0, 180);
    left-- ? requestAnimationFrame(step) : done(gaps.slice(5).sort((a, b) => a - b));
  };
  requestAnimationFrame(step);
})"""
FILTERED = """(text) => new Promise((done) => {
  const field = document.getElementById("search-jobs"), began = performance.now();
  new MutationObserver((_, watcher) => {
    const rows = document.querySelectorAll(".jobs tbody tr:not(.space)");
    if (rows.length !== 1 || !rows[0].textContent.includes(text)) return;
    watcher.disconnect(); done(performance.now() - began);
  }).observe(document.querySelector("main"), {childList: true, subtree: true, characterData: true});
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, text);
  field.dispatchEvent(new Event("input", {bubbles: true}));
})"""


async def test_five_thousand_jobs_scroll_smoothly_and_are_filtered_at_once(
    opened: Open, http: Http, store: Store, figure: Figure
) -> None:
    spec = make_spec(model__base="some/model").model_dump(mode="json")
    for number in range(JOBS):
        await store.create_job(id=f"j-{number:010}", spec={**spec, "name": f"run {number}"}, tenant="default")
    tab = await opened(http.url, viewport={"width": 1400, "height": 900})
    await expect(tab.page.locator(".jobs tbody tr").first).to_contain_text("run")
    paint = await tab.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    gaps = [gap for _ in range(5) for gap in await tab.page.evaluate(FRAMES)]
    gaps.sort()
    seen = await tab.page.locator("p.count").inner_text()
    filtered = sorted([await tab.page.evaluate(FILTERED, f"run {number}") for number in (4321, 1234, 2345, 3456, 4567)])
    figure(
        f"{JOBS} jobs: first paint {paint:.0f} ms, frames p50 {gaps[len(gaps) // 2]:.1f} ms, p95"
        f" {gaps[int(len(gaps) * 0.95)]:.1f} ms over {seen.split(' keys')[0]}, a filter {filtered[2]:.0f} ms"
    )
    aims = "17, 100 and 500 ms, on a quiet machine with a GPU: here the browser draws on the processor"
    assert gaps[len(gaps) // 2] < 70.0 and filtered[2] < 4000.0 and paint < 5000.0, aims


async def test_twenty_long_runs_are_compared_within_a_second(
    opened: Open, http: Http, store: Store, bus: Bus, figure: Figure
) -> None:
    spec = make_spec(model__base="some/model").model_dump(mode="json")
    for number in range(RUNS):
        job = await store.create_job(id=f"j-{number:010}", spec={**spec, "name": f"run {number}"}, tenant="default")
        trainer = Trainer(bus, job)
        for step in range(1, POINTS + 1):
            await trainer.says(step, {"reward/mean": step / POINTS, "loss": 1.0 / step})
    tab = await opened(http.url, viewport={"width": 1400, "height": 900})
    took = []
    for _ in range(3):
        await tab.go("cluster")
        began = time.monotonic()
        await tab.go("compare", ",".join(f"j-{number:010}" for number in range(RUNS)))
        await expect(tab.page.locator("table.compared tbody tr")).to_have_count(RUNS)
        await expect(tab.page.get_by_text("Reading…")).to_have_count(0)
        took.append(time.monotonic() - began)
    figure(f"comparison of {RUNS} runs of {POINTS} points: {sorted(took)[1]:.2f} s")
    assert sorted(took)[1] < 4.0, "aim: 1 s on a quiet machine"
