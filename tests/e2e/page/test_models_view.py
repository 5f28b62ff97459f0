"""The checkpoints of all jobs in the page: lineage, filters, publishing, and a comparison by evaluation."""

from __future__ import annotations

from playwright.async_api import Route, expect

from opentinker.shared.state.store import Store
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.support.api import Http
from tests.support.registry import BASE, LORA, evaluated, kept, trained

pytestmark = IN_BROWSER


async def test_models_are_ordered_by_any_metric(opened: Open, http: Http, store: Store) -> None:
    good, bad = [await kept(store, await trained(store, id=f"j-{name * 10}"), 10, 1000.0) for name in "ab"]
    await evaluated(store, good, 0.25, **{"val/winrate": 0.75, "val/pass/8": 0.5, "val/distance": 3.0})
    await evaluated(store, bad, 0.75, **{"val/winrate": 0.125, "val/pass/8": 0.25, "val/distance": 9.0})
    tab = await opened(http.url, "checkpoints")
    order, rows = tab.page.get_by_label("Order"), tab.page.locator(".models tbody tr")
    best = ["by exact", "by pass@8", "by winrate", "by distance, highest first", "by distance, lowest first"]
    await expect(order.locator("option")).to_have_text(["newest first", "largest first", *best])
    firsts = {"by winrate": good, "by exact": bad, "by distance, lowest first": good, "by distance, highest first": bad}
    for label, first in firsts.items():
        await order.select_option(label=label)
        await expect(rows.first).to_contain_text(first)
        await expect(order.locator("option:checked")).to_have_text(label)


async def test_models_are_filtered_published_and_compared(opened: Open, http: Http, store: Store) -> None:
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0, exact=0.125)
    second = await kept(store, await trained(store, id="j-bbbbbbbbbb", start=first), 20, 2000.0)
    labels = {"project": "maths", "model": {"base": BASE, "lora": LORA}}
    third = await kept(store, await trained(store, id="j-cccccccccc", start=second, **labels), 5, 3000.0, lora=True)
    await evaluated(store, first, 0.25)
    await evaluated(store, second, 0.75)
    tab = await opened(http.url, "checkpoints")
    rows = tab.page.locator(".models tbody tr")
    await expect(rows).to_have_count(3)
    newest = rows.first
    await expect(newest).to_contain_text("lora, rank 8")
    await expect(newest.locator(".lineage")).to_have_text(f"{BASE} → {first} → {second}")
    await expect(rows.last).to_contain_text("exact 0.25")
    await expect(rows.last).to_contain_text("exact 0.125")
    await expect(rows.last).to_contain_text("during training")
    link = newest.get_by_role("link", name=second)
    assert await link.get_attribute("href") == "#/jobs/j-bbbbbbbbbb/checkpoints"

    await tab.page.get_by_label("Order").select_option("exact")
    await expect(rows.first).to_contain_text("exact 0.75")  # the list in this order is there
    await tab.page.get_by_role("button", name=f"Publish {second}").click()
    await tab.page.get_by_label("Name").fill("best.v1")
    await tab.page.get_by_label("Name").press("Enter")
    await tab.page.get_by_label("Published").select_option("yes")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("best.v1")
    await tab.page.get_by_label("Published").select_option("any")

    await expect(rows).to_have_count(3)
    for name in (first, second, third):
        await tab.page.get_by_label(f"Select {name}").check()
    exact = tab.page.locator(".compared tbody tr", has_text="exact")
    await expect(exact.locator("b")).to_contain_text("0.75")
    await expect(exact.locator("td").nth(1)).to_contain_text("0.15 to 0.35")
    await expect(exact.locator("td").nth(3)).to_be_empty()
    await expect(tab.page.locator(".compared th").nth(2)).to_have_text("best.v1")
    await expect(tab.page.locator(".compared tbody tr")).to_have_count(1)
    await tab.page.get_by_label("Setting").select_option("copy_digits")
    await expect(exact.locator("td").nth(1)).to_have_text("0.125")
    await expect(exact.locator("td").nth(2)).to_be_empty()
    await tab.page.get_by_label("Setting").select_option("bandit; greedy; 256 tokens; 2 episodes")
    await expect(exact.locator("b")).to_contain_text("0.75")

    await expect(rows.last).to_contain_text(third)
    order = tab.page.get_by_label("Order").locator("option")
    assert await order.all_inner_texts() == ["newest first", "largest first", "by exact"], "no other metric is known"
    await tab.shows("By exact on bandit; greedy; 256 tokens; 2 episodes.")
    await tab.page.get_by_label("Evaluated on").select_option("copy_digits")
    await tab.shows("By exact on copy_digits.")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text(first)
    await tab.page.get_by_label("Evaluated on").select_option("any")
    await expect(rows).to_have_count(3)

    await tab.page.get_by_label("Search models").fill("MATH")
    await expect(rows).to_have_count(1)
    await expect(tab.page.locator(".compared b")).to_have_count(1)


async def test_the_filters_of_models_are_in_the_address(opened: Open, http: Http, store: Store) -> None:
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa", project="maths"), 10, 1000.0)
    await kept(store, await trained(store, id="j-bbbbbbbbbb"), 20, 2000.0)
    tab = await opened(http.url, "checkpoints")
    rows = tab.page.locator(".models tbody tr")
    await expect(rows).to_have_count(2)
    await tab.page.get_by_label("Search models").fill("aaaa mat")
    await tab.page.get_by_label("Weights").select_option("whole")
    await expect(rows).to_have_count(1)
    await tab.page.get_by_role("link", name="job", exact=False).first.click()
    await expect(rows).to_have_count(0)
    await tab.page.go_back()
    for _ in range(2):
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text(first)
        await expect(tab.page.get_by_label("Search models")).to_have_value("aaaa mat")
        await expect(tab.page.get_by_label("Weights")).to_have_value("whole")
        await tab.page.reload()


async def test_a_list_of_models_that_is_not_complete_says_so(opened: Open, http: Http, store: Store) -> None:
    await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0)

    async def cut(route: Route) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, json={**await answer.json(), "complete": False})

    tab = await opened(http.url, "checkpoints")
    await expect(tab.page.locator(".models tbody tr")).to_have_count(1)
    words = tab.page.get_by_text("among the newest 1,000")
    await expect(words).to_have_count(0)
    await tab.page.route("**/v1/checkpoints?*", cut)
    await expect(words).to_have_count(1)
