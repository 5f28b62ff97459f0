"""Words of others stay words in the page; every view fits a phone and is reached by keys."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from playwright.async_api import expect

from opentinker.envs.png import png
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import LOG
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import TrainSpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.telemetry import LogLine
from tests.conftest import WAIT_S
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import PARTS, Trainer, reward, value
from tests.support.api import SPEC, Http, write_checkpoint

pytestmark = IN_BROWSER

PAYLOAD = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>{{7*7}}'


def write_episodes(home: Path) -> None:
    """Write an episode of training and one of an evaluation, all of whose texts are the payload."""
    episode: dict[str, Any] = {
        **{"step": 1, "group": 7, "sample": 0, "environment": PAYLOAD, "worker": PAYLOAD, "versions": ["1.0"]},
        **{"reward": 1.0, "rewards": {"": 1.0}, "components": {}, "scores": {PAYLOAD: 1.0}, "metrics": {PAYLOAD: 0.5}},
        **{"ending": "env_done", "stops": ["eos"], "tokens": 2, "turns": 1, "seconds": 0.1},
        "views": [
            {
                **{"seat": PAYLOAD, "stream": "", "reward": 1.0, "messages": [{"role": PAYLOAD, "content": PAYLOAD}]},
                "tokens": {
                    **{"text": [PAYLOAD], "ids": [1], "mask": [1], "logprobs": [-0.5], "advantages": [1.0]},
                    **{"versions": [[0, 1, PAYLOAD]], "left_out": 0},
                },
            }
        ],
    }
    (home / "rollouts").mkdir(parents=True)
    (home / "rollouts" / "step-000001.jsonl").write_bytes(orjson.dumps(episode) + b"\n")
    (seen,) = episode["views"]
    exam: dict[str, Any] = {
        "index": 0,
        "reward": 1.0,
        "metrics": {PAYLOAD: 0.5},
        "ending": "env_done",
        "messages": seen["messages"],
    }
    exam["views"] = [{"seat": PAYLOAD, "stream": "", "tokens": seen["tokens"] | {"advantages": None}}]
    exam["messages"] = [{**seen["messages"][0], "images": ["a", "b"]}]
    exam["images"] = {"a": base64.b64encode(png(np.zeros((8, 8, 3), np.uint8))).decode()}
    (home / "transcripts").mkdir()
    (home / "transcripts" / "step-000001.jsonl").write_bytes(orjson.dumps(exam) + b"\n")


async def test_words_of_others_stay_words(opened: Open, http: Http, ctx: Context, store: Store, bus: Bus) -> None:
    spec = {**SPEC, "rollout": {"max_tokens": 8, "stop": [PAYLOAD]}}
    status, body = await http.submit(spec)
    assert status == 201, body
    job = body["id"]
    write_episodes(ctx.settings.data_dir / "jobs" / job)
    await store.update(job, event="note", detail={"words": PAYLOAD})
    line = LogLine(
        job=job,
        service=PAYLOAD,
        worker=PAYLOAD,
        level="error",
        time=time.time(),
        event=PAYLOAD,
        fields={PAYLOAD: PAYLOAD},
        trace=PAYLOAD,
    )
    await bus.emit(LOG, line, job=job, level="error")
    await Trainer(bus, job).says(1, {"reward/mean": 0.5, PAYLOAD: 1.0})
    write_checkpoint(ctx, job, 1, {"model.safetensors": b"weights"})
    tab = await opened(http.url, "jobs", job, "log")
    for part in (".log .event .said", ".log .error .who", ".log .error .said > b", ".log .error .said pre"):
        await expect(tab.page.locator(part, has_text=PAYLOAD).first).to_be_attached(timeout=WAIT_S * 1000)
    await tab.go("jobs", job, "episodes")
    await expect(tab.page.locator(".talk .words")).to_have_text(PAYLOAD)
    for colour in ("mask", "logprob", "advantage", "version"):
        await tab.page.get_by_role("button", name=colour, exact=True).click()
        await expect(tab.page.locator(".tokens span")).to_have_text(PAYLOAD)
    assert PAYLOAD in str(await tab.page.locator(".tokens span").get_attribute("title"))
    await tab.page.get_by_role("button", name="evaluations", exact=True).click()
    for colour in ("mask", "logprob", "version"):
        await tab.page.get_by_role("button", name=colour, exact=True).click()
        await expect(tab.page.locator(".tokens span")).to_have_text(PAYLOAD)
    await expect(tab.page.get_by_role("button", name="advantage", exact=True)).to_have_count(0)
    await tab.page.get_by_role("button", name="text", exact=True).click()
    await expect(tab.page.locator(".talk .words")).to_have_text(PAYLOAD)
    await expect(tab.page.locator(".talk img.picture")).to_have_js_property("naturalWidth", 8)
    await tab.go("jobs", job, "config")
    await expect(tab.page.locator(".config tr", has_text="rollout.stop")).to_contain_text("<script>")
    await tab.page.get_by_label("all settings").check()
    lr = tab.page.locator(".config tr", has_text="train.lr").first.locator("td")
    await expect(lr.nth(2)).to_have_text(orjson.dumps(TrainSpec().lr).decode())
    for view in ("curves", "checkpoints"):
        await tab.go("jobs", job, view)
        await expect(tab.page.locator(f'.tabs a[aria-current="page"][href$="{view}"]')).to_be_visible()
    await tab.go("jobs", job)
    await expect(tab.page.locator(f"#metric-names option[value={orjson.dumps(PAYLOAD).decode()}]")).to_have_count(1)
    await tab.page.get_by_label("Another metric").fill(PAYLOAD)
    await tab.page.keyboard.press("Enter")
    await expect(tab.page.locator(".chart h3").last).to_have_text(PAYLOAD)


async def test_every_view_fits_a_phone_and_is_reached_by_keys(opened: Open, http: Http, bus: Bus, ctx: Context) -> None:
    job = await http.job()
    await Trainer(bus, job).says(1, reward(0.5) | {f"swap/{part}_s": 0.1 for part in ("load", "pause", "resume")})
    write_checkpoint(ctx, job, 1, {"model.safetensors": b"weights"})
    tab = await opened(http.url, viewport={"width": 375, "height": 700}, color_scheme="dark")
    assert await tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    sweep = (await http("POST", "/v1/sweeps", json={**SPEC, "sweep": {"parameters": {"rollout.toy.skill": [0.5]}}}))[1][
        "id"
    ]
    views = (
        (),
        ("environments",),
        ("sweeps",),
        ("sweeps", sweep),
        ("cluster",),
        ("submit",),
        *(("jobs", job, part) for part in PARTS),
    )
    for view in views:
        await tab.go(*view)
        await expect(tab.page.locator("main .empty", has_text="…")).to_have_count(0)
        wide = await tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, view
        await expect(tab.page.locator("h1")).to_have_count(1)
    await tab.go()
    await tab.shows(job)
    for _ in range(40):
        await tab.page.keyboard.press("Tab")
        if await tab.page.evaluate("document.activeElement.getAttribute('href')") == f"#/jobs/{job}":
            break
    await tab.page.keyboard.press("Enter")
    await expect(value(tab, "Reward")).to_have_text("0.5")
