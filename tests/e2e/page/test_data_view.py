"""The tab Data of a job: rows of its data set, found, sorted and opened."""

from __future__ import annotations

from pathlib import Path

import orjson
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import SPEC, Http
from tests.support.listed_rows import count_rows, rows_listed
from tests.support.toys import toy_model

pytestmark = IN_BROWSER


async def test_rows_are_found_sorted_and_opened_to_their_prompt(
    opened: Open, http: Http, bus: Bus, ctx: Context, tmp_path: Path
) -> None:
    model = {**SPEC["model"], "base": str(toy_model(tmp_path / "model"))}
    job = await http.job({**SPEC, "model": model, "environment": {"name": "gsm8k"}})
    home = ctx.settings.data_dir / "jobs" / job
    count_rows(home)
    (home / "rollouts" / "step-000001.jsonl").write_bytes(orjson.dumps({**EPISODE, "step": 1, "row": 0}) + b"\n")
    async with rows_listed(bus):
        tab = await opened(http.url, "jobs", job, "data")
        rows = tab.page.locator("tr[data-row]")
        await expect(rows).to_have_count(50)
        await tab.shows("7,473 of 7,473 rows of gsm8k · 3 were played · solved: reward at least 1")
        await expect(rows.nth(1)).to_contain_text("Weng earns $12")
        await expect(rows.nth(1).locator("svg")).to_have_count(0)

        await tab.page.get_by_label("Order").select_option("solved")
        await expect(rows.first).to_have_attribute("data-row", "2")
        await expect(rows.first.get_by_role("img")).to_have_attribute(
            "aria-label", "solved share from 0 % to 25 %, up to step 40"
        )
        cells = rows.first.locator("td")
        assert [await cells.nth(at).inner_text() for at in (2, 4)] == ["160", "13 %"]
        await tab.page.get_by_label("Solved share", exact=True).select_option("always solved")
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_have_attribute("data-row", "0")

        await tab.page.get_by_label("Solved share", exact=True).select_option("any share")
        await tab.page.get_by_label("Order").select_option("row")
        await tab.page.get_by_role("button", name="Later rows").click()
        await expect(rows.first).to_have_attribute("data-row", "50")
        await tab.page.get_by_label("Search rows").fill("natalia SOLD clips")
        await expect(rows).to_have_count(1)
        await rows.first.locator("td").last.click()
        shown = tab.page.locator(".opened")
        await expect(shown.locator(".words")).to_contain_text("Natalia sold clips to 48 of her friends in April")
        await expect(shown).to_contain_text("tokens")
        await tab.page.keyboard.press("Tab")
        button = tab.page.get_by_role("button", name="Prompt of row 0")
        await expect(button).to_have_attribute("aria-expanded", "true")
        await button.click()
        await expect(shown).to_have_count(0)
        await button.press("Enter")

        await shown.get_by_role("link", name="step 1", exact=True).click()
        await expect(tab.page.locator(".group h2")).to_contain_text("Group 7")
        await expect(tab.page.locator("main")).to_contain_text("step 1")
        await expect(tab.page.locator(".facts", has_text="Sample").get_by_text("Row", exact=True)).to_be_visible()


async def test_a_game_has_no_rows_and_says_so(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    async with rows_listed(bus):
        tab = await opened(http.url, "jobs", job, "data")
        await expect(tab.page.locator("main .problem")).to_contain_text("makes up its episodes")


async def test_rows_of_an_sft_job_are_shown_with_the_turns_that_it_learns(
    opened: Open, http: Http, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"prompt": f"q{n}", "completion": f"a{n}"}) + b"\n" for n in range(60)))
    model = {"base": str(toy_model(tmp_path / "model"))}
    spec = {"name": "s", "kind": "sft", "model": model, "data": {"path": str(path)}}
    stored = parse_spec({**spec, "train": {"steps": 1}}).model_dump(mode="json")
    job = await store.create_job(id="j-sft0000000", spec=stored, tenant="default")
    tab = await opened(http.url, "jobs", job, "data")
    await tab.shows(f"60 of 60 rows of {path}")
    await expect(tab.page.locator("th")).to_have_text(["Row", "Tokens", "Prompt"])
    await expect(tab.page.get_by_label("Order")).to_have_count(0)
    await tab.page.get_by_role("button", name="Prompt of row 7").click()
    await expect(tab.page.locator(".opened .words")).to_have_text(["q7", "a7"])
    await tab.page.get_by_label("Search rows").fill("none of them")
    await tab.shows("No row matches the filters.")


EPISODE = {
    "group": 7, "sample": 0, "environment": "gsm8k", "worker": "rollout-0", "versions": ["1.0"], "reward": 1.0,
    "rewards": {"": 1.0}, "group_rewards": {"": [1.0, 0.0]}, "components": {}, "scores": {}, "metrics": {},
    "ending": "env_done", "stops": ["eos"], "tokens": 3, "turns": 1, "seconds": 0.1,
    "views": [{"seat": "", "stream": "", "policy": "", "reward": 1.0, "tokens": None,
               "messages": [{"role": "user", "content": "Natalia"}, {"role": "assistant", "content": "72"}]}],
}  # fmt: skip
