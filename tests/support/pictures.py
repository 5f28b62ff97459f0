"""The dashboard's pictures in the documentation, taken anew: `python -m tests.support.pictures`, where Chromium is.

A model learns to copy digits meanwhile, with two rollout workers and two env workers, by the real engine.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import tomllib
from pathlib import Path

from playwright.async_api import ViewportSize, async_playwright

from examples.models.make_tiny import make_tiny
from loadtest.support.target import target
from tests.conftest import until
from tests.support.cluster import ROOT

FOLDER = ROOT / "docs" / "images"
SIZE: ViewportSize = {"width": 1180, "height": 800}
PARTS = ("curves", "timeline", "episodes")
NAMES = {"curves": "job"}
STEPS = 120
LONG_S = 600.0
DRAWN_S = 3.0


async def take(url: str, key: str, job: str) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport=SIZE, color_scheme="light")
        await page.goto(url)
        await page.get_by_label("API key").fill(key)
        await page.keyboard.press("Enter")
        for part in PARTS:
            await page.goto(f"{url}/#/jobs/{job}/{part}")
            if part == "episodes":
                await page.get_by_role("button", name="logprob").click()
            await asyncio.sleep(DRAWN_S)
            await page.screenshot(path=FOLDER / f"dashboard-{NAMES.get(part, part)}.png")
        await browser.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        await asyncio.to_thread(make_tiny, model)
        spec = tomllib.loads((ROOT / "examples" / "copy_digits.toml").read_text())
        spec["model"]["base"] = str(model)
        spec["resources"] = {"rollout_workers": 2}
        async with target(None, env_workers=2, rollout_workers=2) as at:
            job = (await at.client.submit(spec))["id"]

            async def far() -> bool:
                return (await at.client.job(job))["step"] >= STEPS

            await until(far, timeout_s=LONG_S)
            await take(at.url, at.key or "", job)


if __name__ == "__main__":
    asyncio.run(main())
