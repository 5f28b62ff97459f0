"""A Tinker server on the page: how to connect a client, its models, their curves and checkpoints."""

from __future__ import annotations

from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import ModelProgress
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import Http
from tests.support.client_models import JOB, model_of, saved, send, server

pytestmark = IN_BROWSER
SESSION = "s-4f2a91c0ffee4f2a91c0"


async def test_a_tinker_server_shows_its_clients_models(opened: Open, http: Http, store: Store, bus: Bus) -> None:
    await server(store)
    tab = await opened(http.url, "jobs", JOB)
    parts = tab.page.get_by_role("navigation", name="Parts of the job")
    await expect(parts.locator("a")).to_have_text(["Models", "Curves", "Timeline", "Log", "Config"])
    await expect(parts.locator("[aria-current=page]")).to_have_text("Models")
    await expect(tab.page.locator(".top progress")).to_have_count(0)
    connect = tab.page.get_by_role("region", name="Connect a client")
    await expect(connect).to_contain_text(f"export TINKER_BASE_URL={http.url}\nexport TINKER_API_KEY=tml-KEY")

    model, tinker = await model_of(store, "default", SESSION), TinkerStore(store.redis)
    await tinker.set_progress(model.id, ModelProgress(passes=3, steps=2, tokens=1200, loss=0.5, curve=[2.0, 1.0, 0.5]))
    await tinker.add_checkpoint(saved(model, "final", size=2048))
    await send(store, model, 0)
    row = tab.page.get_by_role("table", name="Models", exact=True).locator("tbody tr")
    await expect(row).to_have_count(1)
    await expect(connect).to_have_count(0)
    await expect(row.locator("code")).to_have_text("s-4f2a91:0")
    for name, text in {"Rank": "16", "Steps": "2", "Loss": "0.5", "Tokens": "1200", "Client": "alive"}.items():
        await expect(row.locator(f"[data-label='{name}']")).to_have_text(text)
    await expect(row.locator("[data-label='Waits for']")).to_contain_text("the server, which is queued")
    await expect(row.get_by_role("img")).to_have_attribute("aria-label", "loss from 2 to 0.5 in 3 passes")
    path = tab.page.get_by_role("textbox", name="Path of final")
    await expect(path).to_have_value(f"tinker://{SESSION}:train:0/weights/final")
    await path.focus()
    assert await tab.page.evaluate("getSelection().toString()") == f"tinker://{SESSION}:train:0/weights/final"

    source = MetricSource(bus, JOB, "trainer", prefix=f"models/{model.id}/")
    for step in (1, 2, 3):
        await source.emit(step, {"loss": 2.0 / step, "tokens": 400.0, "queue_seconds": 0.01})
    await parts.get_by_role("link", name="Curves").click()
    for title in ("Loss of models", "Tokens of models", "Queue time of models"):
        await expect(tab.page.locator(f"[data-chart='{title}']")).to_contain_text("s-4f2a91:0")

    await tab.go("jobs")
    await expect(tab.page.locator("tr", has_text=JOB).locator("[data-label=Progress]")).to_have_text("serves")
