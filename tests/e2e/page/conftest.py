"""Tabs of a real browser that shows the page of a scheduler."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from opentinker.services.scheduler.http import dashboard
from tests.conftest import WAIT_S, free_port
from tests.support.api import OPERATOR, bearing

expect.set_options(timeout=WAIT_S * 1000)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BUILT = (dashboard.HOME / dashboard.INDEX).exists()
REQUIRED = "OPENTINKER_BROWSER_TESTS" in os.environ
"""Whether tests of the page fail, and are not skipped, where something is missing: .ci/run says so."""
IN_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and not REQUIRED, reason="no Chromium on this machine: make browser (as root, on Debian)"
    ),
    pytest.mark.skipif(not BUILT and not REQUIRED, reason="the dashboard is not built: make dashboard"),
]
Open = Callable[..., Awaitable["Tab"]]
T = TypeVar("T")


class Tab:
    """A tab, and all that it asked for and complained about."""

    def __init__(self, tab: Page, url: str) -> None:
        self.page, self.url = tab, url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        tab.set_default_timeout(WAIT_S * 1000)
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", lambda said: self.complaints.append(said.text) if "Security Policy" in said.text else None)
        tab.on("dialog", lambda dialog: dialog.accept())

    async def go(self, *parts: str) -> None:
        await self.page.goto(f"{self.url}/#/{'/'.join(parts)}")

    async def shows(self, text: str) -> None:
        await expect(self.page.locator("body")).to_contain_text(text)


@pytest.fixture(scope="session")
def chromium_url() -> Iterator[str]:
    """One browser for all tests. It lives in a thread with its own event loop, since each test has one."""
    assert CHROMIUM is not None, "OPENTINKER_BROWSER_TESTS is set, but there is no Chromium: make browser"
    assert BUILT, "OPENTINKER_BROWSER_TESTS is set, but the dashboard is not built: make dashboard"
    loop, port = asyncio.new_event_loop(), free_port()
    thread = threading.Thread(target=loop.run_forever, name="chromium")
    thread.start()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(WAIT_S)

    try:
        playwright = run(async_playwright().start())
        options = [f"--remote-debugging-port={port}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = run(playwright.chromium.launch(executable_path=CHROMIUM, args=options))
        yield f"http://127.0.0.1:{port}"
        run(browser.close())
        run(playwright.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@pytest.fixture
async def chromium(chromium_url: str) -> AsyncIterator[Browser]:
    """A connection to the browser; its end closes the contexts that the test has opened."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium_url)
        yield browser
        await browser.close()


@pytest.fixture
async def opened(chromium: Browser) -> AsyncIterator[Open]:
    """Opens tabs; each with a memory of its own. At the end none has complained or asked anybody else."""
    tabs: list[Tab] = []
    async with AsyncExitStack() as stack:

        async def open(url: str, *at: str, key: str = OPERATOR, **settings: Any) -> Tab:
            ground = await chromium.new_context(accept_downloads=True, **settings)
            stack.push_async_callback(ground.close)
            if key:
                signed = await ground.request.post(f"{url}/v1/session", headers=bearing(key))
                assert signed.status == 201, await signed.text()
            tab = Tab(await ground.new_page(), url)
            tabs.append(tab)
            await tab.go(*at)
            return tab

        yield open
        for tab in tabs:
            assert tab.complaints == []
            elsewhere = [url for url in tab.asked if not url.startswith((f"{tab.url}/", "blob:", "ws://127.0.0.1:"))]
            assert elsewhere == []
            assert await tab.page.evaluate("window.pwned") is None
