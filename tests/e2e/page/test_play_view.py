"""Environments in the page: what they are, and an episode that a person plays."""

from __future__ import annotations

import asyncio
import json

from playwright.async_api import Route, expect

from tests.conftest import WAIT_S
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.integration.rollout_worker.env_workers import Workers, workers
from tests.support.api import SPEC, Http

__all__ = ["workers"]
pytestmark = IN_BROWSER


async def test_an_environment_is_read_and_played(opened: Open, http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    tab = await opened(http.url, "environments")
    await expect(tab.page.locator("tr", has_text="gsm8k")).to_contain_text("Grade-school word problems")
    await tab.page.get_by_role("link", name="copy_digits").click()
    await expect(tab.page.locator("h1")).to_have_text("copy_digits")
    digits = tab.page.locator("tr", has_text="digits").first
    await expect(digits).to_contain_text("integer")
    await tab.shows("Played by its scripted expert")
    config = tab.page.get_by_label("Config, as JSON")
    await config.fill("[3]")
    await tab.page.get_by_role("button", name="Begin").click()
    await tab.shows("The config is not an object")
    await config.fill('{"digits": 4}')
    await tab.page.get_by_label("Row").fill("2")
    await tab.page.get_by_role("button", name="Begin").click()
    prompt = tab.page.locator(".message.user .words")
    await expect(prompt).to_contain_text("=")
    asked = (await prompt.inner_text()).removesuffix("=")
    assert len(asked) == 4 and asked.isdigit()
    await tab.page.get_by_label("Your answer").fill(asked)
    await tab.page.get_by_role("button", name="Answer").click()
    await tab.shows("The episode has ended. Reward 1.")
    await tab.page.get_by_role("button", name="Play again").click()
    await expect(tab.page.get_by_role("status")).to_contain_text("Reward 0")
    await expect(prompt).to_have_count(1)
    await tab.page.get_by_role("button", name="End").click()
    await expect(tab.page.get_by_role("button", name="Begin")).to_be_visible()
    assert tab.complaints == []


async def test_a_wrong_config_is_refused_in_words(opened: Open, http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    tab = await opened(http.url, "environment", "copy_digits")
    await tab.page.get_by_label("Config, as JSON").fill('{"digit": 4}')
    await tab.page.get_by_role("button", name="Begin").click()
    await tab.shows("did you mean digits?")


async def test_a_row_of_a_job_is_played_with_both_seats(opened: Open, http: Http, workers: Workers) -> None:
    job = await http.job({**SPEC, "environment": {"name": "matching_pennies"}, "seats": {}})
    await workers.start("env-0")
    tab = await opened(http.url, "play", job, "0")
    await tab.page.get_by_role("button", name="Begin").click()
    fields = tab.page.locator("textarea")
    await expect(fields).to_have_count(2)
    for at in range(2):
        await fields.nth(at).fill("heads")
    await tab.page.get_by_role("button", name="Answer").click()
    await expect(tab.page.get_by_role("status")).to_contain_text(": ")


async def test_a_bot_takes_the_seat_that_the_person_leaves_to_it(opened: Open, http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    tab = await opened(http.url, "environment", "tictactoe")
    first, second = (tab.page.get_by_label(f"Player of {seat}") for seat in ("first", "second"))
    await expect(first).to_have_value("")
    await first.select_option("perfect")
    await second.select_option("random")
    await tab.page.get_by_role("button", name="Begin").click()
    await tab.shows("Bots play every seat: play at least one yourself.")
    await first.select_option("You")
    await tab.page.get_by_role("button", name="Begin").click()
    for field in range(1, 10):  # the person goes on as `first` until the game is over, also by an illegal move
        await tab.page.get_by_label("Answer of first").fill(str(field))
        await tab.page.get_by_role("button", name="Answer").click()
        await expect(tab.page.locator(".message.assistant")).to_have_count(field)
        if await tab.page.get_by_role("button", name="Play again").is_visible():
            break
    await expect(tab.page.get_by_label("Answer of second")).to_have_count(0)
    await tab.shows("The episode has ended.")
    assert tab.complaints == []


async def test_a_play_of_a_job_begins_with_the_jobs_bots(opened: Open, http: Http, workers: Workers) -> None:
    seats = {"s*": {"bot": "random"}}
    job = await http.job({**SPEC, "environment": {"name": "tictactoe"}, "seats": seats})
    await workers.start("env-0")
    tab = await opened(http.url, "play", job, "0")
    await expect(tab.page.get_by_label("Player of second")).to_have_value("random")
    await expect(tab.page.get_by_label("Player of first")).to_have_value("")
    asked = tab.page.expect_request(lambda request: request.url.endswith("/v1/plays"))
    async with asked as sent:
        await tab.page.get_by_role("button", name="Begin").click()
    assert json.loads((await sent.value).post_data or "")["bots"] == {"second": "random"}
    await expect(tab.page.get_by_label("Answer of first")).to_be_visible()


async def test_an_episode_that_opens_after_the_reader_left_is_ended(opened: Open, http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    tab = await opened(http.url, "environment", "copy_digits")
    begun, left, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(route: Route) -> None:
        begun.set()
        await left.wait()
        await route.continue_()

    await tab.page.route("**/v1/plays", late)
    tab.page.on("response", lambda said: ended.set() if said.request.method == "DELETE" and said.ok else None)
    await tab.page.get_by_role("button", name="Begin").click()
    await begun.wait()
    await tab.page.get_by_role("button", name="End").click()
    await expect(tab.page.get_by_role("button", name="Begin")).to_be_visible()
    left.set()
    await asyncio.wait_for(ended.wait(), WAIT_S)
