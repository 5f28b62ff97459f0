"""No view has a serious finding of axe-core, in either theme, on a phone or a desktop."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from playwright.async_api import ViewportSize, expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker.store import TinkerStore
from tests.e2e.page.conftest import IN_BROWSER, REQUIRED, Open, Tab
from tests.e2e.page.running_jobs import PARTS, Trainer, reward
from tests.support.api import SPEC, Http, write_checkpoint
from tests.support.client_models import model_of, saved, server
from tests.support.cluster import ROOT
from tests.support.listed_rows import count_rows, rows_listed

AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [*IN_BROWSER, pytest.mark.skipif(not AXE.exists() and not REQUIRED, reason="no axe-core: make dashboard")]
RUN = "(rules) => axe.run(document, {resultTypes: ['violations'], ...(rules.length && {runOnly: rules})})"
HAS_THEME = "theme => (document.documentElement.dataset.theme ?? theme) === theme"  # /docs has one alone
HAS_WIDTH = "width => window.innerWidth === width"
OF_COLOURS = ["color-contrast", "link-in-text-block"]
THEMES: dict[Literal["light", "dark"], list[str]] = {"light": [], "dark": OF_COLOURS}
SIZES: dict[str, ViewportSize] = {"desktop": {"width": 1400, "height": 900}, "phone": {"width": 375, "height": 700}}


async def findings(tab: Tab) -> list[str]:
    """The serious and critical ones of a view in all sizes and themes, each with an element that has it; the dark theme
    differs in colours alone."""
    serious = []
    if not await tab.page.evaluate("'axe' in window"):
        await tab.page.evaluate(AXE.read_text())
    for theme, rules in THEMES.items():
        await tab.page.emulate_media(color_scheme=theme)
        await tab.page.wait_for_function(HAS_THEME, arg=theme)  # at each frame: a page hears of it when it draws
        for size, viewport in SIZES.items():
            await tab.page.set_viewport_size(viewport)
            await tab.page.wait_for_function(HAS_WIDTH, arg=viewport["width"])
            found: dict[str, Any] = await tab.page.evaluate(RUN, rules)
            shown = f"{size}, {theme}"
            serious += [(shown, one) for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [
        f"{shown}: {one['id']}: {node['html'][:160]}: {node['failureSummary'][:200]}"
        for shown, one in serious
        for node in one["nodes"][:2]
    ]


async def test_every_view_can_be_used_by_everybody(opened: Open, http: Http, bus: Bus, ctx: Context) -> None:
    job = await http.job()
    learned = await http.job({**SPEC, "environment": {"name": "gsm8k"}})
    count_rows(ctx.settings.data_dir / "jobs" / learned)
    await Trainer(bus, job).says(1, reward(0.5))
    write_checkpoint(ctx, job, 1, {"model.safetensors": b"weights"})
    client = await model_of(ctx.store, "default", await server(ctx.store))
    await TinkerStore(ctx.store.redis).add_checkpoint(saved(client, "final"))
    swept = await http("POST", "/v1/sweeps", json={**SPEC, "sweep": {"parameters": {"rollout.toy.skill": [0.5]}}})
    views: tuple[tuple[str, ...], ...] = (
        (), ("checkpoints",), ("environments",), ("sweeps",), ("sweeps", swept[1]["id"]), ("cluster",), ("submit",),
        ("submit", job), ("environment", "copy_digits"), *(("jobs", job, part) for part in PARTS),
        ("jobs", learned, "data"), ("jobs", client.job, "models"), ("compare", f"{job},{learned}"), ("no-such-view",),
    )  # fmt: skip
    tab = await opened(http.url)
    found = {}
    async with rows_listed(bus):
        for view in views:
            await tab.go(*view)
            await expect(tab.page.locator("h1")).to_have_count(1)
            await expect(tab.page.locator("main .empty", has_text="…")).to_have_count(0)
            if "submit" in view:
                await tab.page.locator(".cm-content").wait_for()
            if learned in view:
                await tab.page.get_by_role("button", name="Prompt of row 0").click()
            if wrong := await findings(tab):
                found["/".join(view)] = wrong
    await tab.page.get_by_role("button", name="Sign out").click()
    await tab.page.get_by_label("API key").wait_for()
    if wrong := await findings(tab):
        found["sign in"] = wrong
    assert found == {}
