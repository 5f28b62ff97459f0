"""Evaluations on the page: categories of a result, a table over checkpoints, episodes by outcome and opponent."""

from __future__ import annotations

from typing import Any

import orjson
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.integration.client.test_evaluation_commands import VALUES, line, write
from tests.support.api import SPEC, Http, write_checkpoint

pytestmark = IN_BROWSER
EVALUATED = "j-0123456789"


async def evaluate(store: Store, job: str, step: int, values: dict[str, float]) -> None:
    """Store an eval job that has played the checkpoint of a step."""
    spec: dict[str, Any] = {
        "name": "judge",
        "kind": "eval",
        "model": {"base": "m"},
        "environment": {"name": "bandit"},
    }
    stored = {**parse_spec(spec).model_dump(mode="json"), "start": {"from": f"{job}@{step}"}}
    await store.create_job(id=EVALUATED, spec=stored, tenant="default")
    result = {"version": f"1.{step}", "step": step, "values": values}
    await store.update(EVALUATED, result=orjson.dumps(result).decode())


async def test_a_result_has_a_table_of_its_categories(opened: Open, http: Http, store: Store) -> None:
    await evaluate(store, await http.job(), 4, VALUES)
    tab = await opened(http.url, "jobs", EVALUATED)
    card = tab.page.get_by_role("region", name="Result")
    rows = card.get_by_role("table", name="By category").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_have_text("number theory4" + "0.75 0.5 to 1" + "0.25 0.0456 to 0.699")
    await expect(card.locator("tr", has_text="task/number theory")).to_have_count(0)


async def test_evaluations_are_a_table_over_checkpoints(
    opened: Open, http: Http, store: Store, bus: Bus, ctx: Context
) -> None:
    job = await http.job()
    write_checkpoint(ctx, job, 4, {"model.safetensors": b"weights"})
    await evaluate(store, job, 4, VALUES)
    source = MetricSource(bus, job, "validation")
    for step, mean in ((2, 0.125), (4, 0.375)):
        await source.emit(
            step, {"val/episodes": 8.0, "val/reward/mean": mean, "val/reward/low": 0.0, "val/reward/high": 0.5}
        )
    source.close()
    tab = await opened(http.url, "jobs", job, "checkpoints")
    table = tab.page.get_by_role("region", name="Evaluations by step")
    rows = table.locator("tbody tr")
    await expect(rows).to_have_count(3)
    await expect(rows.nth(0)).to_contain_text("4schedule0.375 0 to 0.5")
    await expect(rows.nth(1)).to_contain_text("4bandit; greedy; 256 tokens0.5")
    await expect(rows.nth(2)).to_contain_text("2schedule0.125")
    await table.get_by_role("button", name="categories").click()
    await expect(table.locator("th")).to_have_text(["Step", "By", "a/b", "number theory"])
    await expect(rows.nth(1)).to_contain_text("0.25 0.0456 to 0.699")
    await rows.nth(1).get_by_role("link", name="bandit").click()
    await expect(tab.page.get_by_role("region", name="Result")).to_contain_text("weights 1.4")


async def test_episodes_of_evaluations_are_filtered_by_outcome_and_opponent(
    opened: Open, http: Http, ctx: Context
) -> None:
    job = await http.job({**SPEC, "validation": {"every": 5}})
    lines = [
        line(0, 1.0, opponent="weak", outcome=1.0),
        line(1, 0.0, opponent="weak", outcome=0.0),
        line(2, 0.0, opponent="strong", outcome=0.0),
    ]
    write(ctx.settings.data_dir / "jobs" / job, lines)
    tab = await opened(http.url, "jobs", job, "episodes")
    await tab.page.get_by_role("button", name="evaluations", exact=True).click()
    episodes = tab.page.locator(".card.group .words")
    await expect(episodes).to_have_text(["episode 0", "episode 1", "episode 2"])
    await tab.page.get_by_role("button", name="lost 2", exact=True).click()
    await expect(episodes).to_have_text(["episode 1", "episode 2"])
    await tab.page.get_by_role("button", name="strong (0 won, 0 drawn, 1 lost)").click()
    await expect(episodes).to_have_text(["episode 2"])
    await tab.page.get_by_role("button", name="won 1", exact=True).click()
    await tab.shows("No kept episode of this step had this outcome.")
    await tab.page.get_by_role("group", name="against").get_by_role("button", name="all").click()
    await expect(episodes).to_have_text(["episode 0"])
