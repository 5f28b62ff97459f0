"""The dashboard in a real browser, on a scheduler that runs here and on a whole cluster.

make browser dashboard        what these tests need; without either they are skipped, and say so
"""

from __future__ import annotations

import asyncio
import base64
import re
import signal as signal_of
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from playwright.async_api import Route, expect

from opentinker.client import AsyncClient
from opentinker.envs.png import png
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import LOG, METRIC, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Role
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.telemetry import LogLine, MetricPoint, Segment, TimelinePart
from tests.conftest import WAIT_S, NewContext
from tests.e2e.page.conftest import IN_BROWSER, Open, Tab
from tests.support.api import OPERATOR, SPEC, Http, new_key_of, write_checkpoint
from tests.support.cluster import Cluster, toy_cluster
from tests.support.factories import make_spec
from tests.support.scheduling import new_job, scheduler

pytestmark = IN_BROWSER
PAYLOAD = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>{{7*7}}'
WHOLE = re.compile(r"^\s*live\s*(· \d+ points? (is|are) nowhere any more)?\s*$")
LIVE_AGAIN_S = 15.0
"""5 is meant, of a machine that does nothing else."""


class Trainer:
    """Says what a trainer would, point by point."""

    def __init__(self, bus: Bus, job: str, source: str = "trainer") -> None:
        self._bus, self._job, self._source = bus, job, source
        self._seq = 0

    async def says(self, step: int, values: dict[str, float]) -> None:
        point = MetricPoint(
            job=self._job,
            source=self._source,
            incarnation="one",
            seq=self._seq,
            time=1e9 + step,
            step=step,
            values=values,
        )
        self._seq += 1
        await self._bus.emit(METRIC, point, job=self._job, source=self._source)


def reward(mean: float) -> dict[str, float]:
    return {"reward/mean": mean, "reward/std": 0.1, "step_seconds": 0.5, "exact": mean / 2}


async def saved(tab: Tab, button: str, *, exact: bool = False) -> bytes:
    """The file that it gives."""
    async with tab.page.expect_download() as download:
        await tab.page.get_by_role("button", name=button, exact=exact).click()
    path = await (await download.value).path()
    return await asyncio.to_thread(path.read_bytes)


def value(tab: Tab, chart: str) -> Any:
    return tab.page.locator(f'[data-chart="{chart}"] .legend b').first


# --- who looks ------------------------------------------------------------------------------------------------------


async def test_a_key_is_asked_for_and_stays_in_the_tab(opened: Open, http: Http) -> None:
    job = await http.job()
    tab = await opened(http.url, key="")
    await tab.page.get_by_label("API key").fill(OPERATOR[:-1])
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.shows("malformed API key")
    await tab.page.get_by_label("API key").fill(OPERATOR)
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.shows(job)
    await tab.shows("operator of default")
    assert await tab.page.evaluate("document.cookie") == ""
    assert OPERATOR not in str(await tab.page.evaluate("Object.values(localStorage)"))
    assert not [url for url in tab.asked if OPERATOR in url]
    await tab.page.get_by_role("button", name="Sign out").click()
    await tab.shows("API key required")
    assert await tab.page.evaluate("sessionStorage.length") == 0


async def test_a_server_without_keys_says_so_loudly(opened: Open, new_context: NewContext) -> None:
    async with new_context(auth=False) as ctx, scheduler(ctx) as url:
        tab = await opened(url, key="")
        await tab.shows("This server requires no key")
        await tab.shows("No jobs yet")


@pytest.mark.nightly
async def test_a_viewer_sees_all_of_its_tenant_and_no_way_to_change_it(opened: Open, http: Http, store: Store) -> None:
    await http.job()
    async with http.session.get(f"{http.url}/v1/jobs") as response:
        other = (await response.json())["jobs"][0]["id"]
    viewer = await new_key_of(store, "red", Role.VIEWER)
    tab = await opened(http.url, key=viewer)
    await tab.shows("No jobs yet")
    await tab.go("jobs", other)
    await tab.shows(f"no job '{other}'")
    await tab.go("cluster")
    await tab.shows("Only operators")
    own = await new_key_of(store, "default", Role.VIEWER)
    tab = await opened(http.url, key=own)
    await tab.go("jobs", other)
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("test")
    assert await tab.page.get_by_role("button", name="Cancel").count() == 0
    assert await tab.page.get_by_role("link", name="Submit").count() == 0


# --- what is seen ---------------------------------------------------------------------------------------------------


async def test_curves_are_those_of_the_job_and_go_on(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 31):
        await trainer.says(step, reward(0.25))
    tab = await opened(http.url, "jobs", job)
    await expect(value(tab, "Reward")).to_have_text("0.25")
    await expect(value(tab, "Success")).to_have_text("0.125")
    for step in range(31, 61):
        await trainer.says(step, reward(0.75))
    await expect(value(tab, "Reward")).to_have_text("0.75")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert lines[0] == 'step,"reward"' and lines[1] == "1,0.25" and lines[60] == "60,0.75"
    assert (await saved(tab, "Reward as PNG")).startswith(b"\x89PNG")


@pytest.mark.nightly
async def test_ten_thousand_points_are_drawn(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 10_001):
        await trainer.says(step, reward((step % 100) / 100))
    tab = await opened(http.url)
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    await tab.page.wait_for_function(paint)
    await tab.go("jobs", job)
    await expect(tab.page.locator('[data-chart="Reward"] .tools small')).to_have_text(
        "step 10.0k", timeout=WAIT_S * 1000
    )
    drawn = """async () => {
        const began = performance.now();
        document.querySelector('[aria-label="smooth"] button:last-child').click();
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        return performance.now() - began;
    }"""
    took = [await tab.page.evaluate(drawn), await tab.page.evaluate(paint)]
    print(f"all charts anew in {took[0]:.0f} ms, first paint after {took[1]:.0f} ms", end=" ")
    assert max(took) < 10_000


async def test_an_eval_jobs_result_stands_on_its_page_and_in_the_list(opened: Open, http: Http, store: Store) -> None:
    spec = parse_spec({"name": "judge", "kind": "eval", "model": {"base": "m"}, "environment": {"name": "bandit"}})
    job = "j-0123456789"
    await store.create_job(id=job, spec=spec.model_dump(mode="json"), tenant="default")
    values = {"val/reward/mean": 0.5, "val/reward/low": 0.4, "val/reward/high": 0.6, "val/pass/1": 0.891}
    result = {"version": "1.197", "step": 197, "values": values}
    progress = {"val/reward/mean": 0.5, "val/pass/1": 0.891}
    await store.update(job, result=orjson.dumps(result).decode(), progress=orjson.dumps(progress).decode())
    tab = await opened(http.url)
    await expect(tab.page.locator("tr", has_text=job)).to_contain_text("val/pass/1 0.891")
    await tab.go("jobs", job)
    card = tab.page.get_by_role("region", name="Result")
    await expect(card).to_contain_text("weights 1.197")
    await expect(card.locator("tr", has_text="reward/mean")).to_contain_text("0.5" + "0.4 to 0.6")
    await expect(card.locator("tr", has_text="pass/1")).to_contain_text("0.891")


async def test_curves_open_as_they_were_measured(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step, mean in enumerate((0.0, 0.0, 1.0), 1):
        await trainer.says(step, {**reward(mean), "lr": mean})
    tab = await opened(http.url, "jobs", job)
    await expect(tab.page.get_by_role("group", name="smooth").get_by_role("button", pressed=True)).to_have_text("off")
    await expect(value(tab, "Reward")).to_have_text("1")


async def test_steps_that_were_rolled_back_are_gone(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    trainer = Trainer(bus, job)
    for step in range(1, 11):
        await trainer.says(step, reward(0.5))
    await Trainer(bus, job, "trainer-again").says(4, reward(0.9))
    tab = await opened(http.url, "jobs", job)
    await expect(value(tab, "Reward")).to_have_text("0.9")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4"]


@pytest.mark.nightly
async def test_what_a_worker_did_while_its_messages_were_lost_is_not_known(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    for seq in (0, 1, 4, 5):
        segments = [Segment(lane="training", kind="step", start=1000.0 + seq, end=1000.8 + seq)]
        part = TimelinePart(job=job, worker="trainer-0", incarnation="one", seq=seq, segments=segments)
        await bus.emit(TIMELINE, part, job=job, worker="trainer-0")
    tab = await opened(http.url, "jobs", job, "timeline")
    await tab.shows("2 lost.")
    lanes = tab.page.locator(".timeline canvas")
    await lanes.press("ArrowUp")
    await lanes.press("ArrowLeft")
    await expect(tab.page.locator(".chosen")).to_contain_text("training of trainer-0: step 800 ms")


async def test_the_timeline_says_where_the_time_goes(opened: Open, http: Http, bus: Bus, store: Store) -> None:
    job, now = await http.job(), time.time()
    await store.update(job, created=now - 60.0)
    segments = [Segment(lane="training", kind="step", start=now - 45.0, end=now - 15.0)]
    part = TimelinePart(job=job, worker="trainer-0", incarnation="one", seq=0, segments=segments)
    await bus.emit(TIMELINE, part, job=job, worker="trainer-0")
    await Trainer(bus, job).says(1, {**reward(0.0), "zero_variance": 1.0})
    tab = await opened(http.url, "jobs", job, "timeline")
    card = tab.page.get_by_label("Where the time goes")
    await expect(card.locator("tr")).to_have_text(
        [re.compile(r"^training(4|5)\d %$"), re.compile(r"^nothing(4|5)\d %$")]
    )
    await expect(card).to_contain_text("all rewards are equal: nothing is learned from them")


async def test_many_env_workers_are_one_lane_until_it_is_opened(opened: Open, http: Http, bus: Bus) -> None:
    job = await http.job()
    for number in range(8):
        segments = [Segment(lane="env", kind="turn", start=1000.0 + number, end=1004.0 + number, level=2.0)]
        part = TimelinePart(job=job, worker=f"env-{number}", incarnation="one", seq=0, segments=segments)
        await bus.emit(TIMELINE, part, job=job, worker=f"env-{number}")
    tab = await opened(http.url, "jobs", job, "timeline")
    rows, fold = tab.page.locator(".timeline li"), tab.page.get_by_role("button", name="env: show each worker")
    await expect(rows).to_have_text(re.compile(r"env 8 workers\d+%"))
    await tab.page.locator(".timeline canvas").press("ArrowLeft")
    await expect(tab.page.locator(".chosen")).to_contain_text(re.compile(r"env of 8 workers: turn \d+ ms, \d\.\d at"))
    await fold.click()
    await expect(rows).to_have_count(8)
    await expect(rows.last).to_contain_text("env-7")
    await fold.click()
    await expect(rows).to_have_count(1)


async def test_two_runs_are_compared(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [await http.job(), await http.job()]
    for job, mean in zip(jobs, (0.25, 0.75), strict=True):
        await Trainer(bus, job).says(1, reward(mean))
    tab = await opened(http.url, "jobs", jobs[0])
    await expect(value(tab, "Reward")).to_have_text("0.25")
    await tab.page.get_by_label("Compare with").select_option(jobs[1])
    await expect(tab.page.locator('[data-chart="Reward"] .legend')).to_contain_text(f"{jobs[1]} 0.75")


POLICIES = ("speaker", "listener")
GAME = {
    **{"name": "game", "model": SPEC["model"], "environment": {"name": "signalling"}},
    **{"algorithm": {"group_size": 2, "groups_per_batch": 4}, "train": {"steps": 24}},
    "policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 48}}},
    "seats": {name: name for name in POLICIES},
}


async def new_game(http: Http, bus: Bus, ctx: Context) -> str:
    """Return a job with two policies, each with curves and a checkpoint of its own."""
    status, body = await http.submit(GAME)
    assert status == 201, body
    job: str = body["id"]
    for name, mean in zip(POLICIES, (0.25, 0.75), strict=True):
        trainer = Trainer(bus, job, f"trainer~{name}")
        for step in range(1, 4):
            values = {**reward(mean * step / 3), "entropy": 3 - step, "loss/policy": -mean, "loss/kl": mean / 10}
            await trainer.says(step, {f"{name}/{metric}": value for metric, value in values.items()})
        other = POLICIES[name == "speaker"]
        won = {other: mean, "random": 0.5 + mean / 2, "random/low": 0.4, "random/high": 0.9}
        rated = {f"{name}/val/winrate/{opponent}": rate for opponent, rate in won.items()}
        await trainer.says(3, {**rated, f"{name}/val/rating": 100 * mean, f"{name}/val/rating/error": 20})
        write_checkpoint(ctx, f"{job}~{name}", 3 if name == "speaker" else 6, {"model.safetensors": b"weights"})
    return job


async def test_policies_of_one_game_are_drawn_side_by_side_and_one_alone(
    opened: Open, http: Http, bus: Bus, ctx: Context
) -> None:
    job = await new_game(http, bus, ctx)
    tab = await opened(http.url, "jobs", job)
    legend = tab.page.locator('[data-chart="Reward"] .legend')
    await expect(legend).to_have_text("listener 0.75speaker 0.25")
    await expect(tab.page.locator('[data-chart="Entropy"] .legend .key')).to_have_count(2)
    await expect(tab.page.locator('[data-chart="Loss"] .legend')).to_contain_text("listener KL term 0.075")
    await expect(tab.page.locator(".top [data-policy=listener]")).to_contain_text("3 / 48")
    rates = tab.page.get_by_role("region", name="Win rates").locator("tr")
    assert [await row.locator("th, td").all_inner_texts() for row in await rates.all()] == [
        ["policy", "against listener", "against speaker", "against random"],
        ["listener", "–", "75%", "88%\n40% to 90%"],
        ["speaker", "25%", "–", "63%\n40% to 90%"],
    ]
    await expect(tab.page.locator('[data-chart="Rating"] .legend')).to_have_text("listener 75speaker 25")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert lines[0] == 'step,"listener","speaker"' and lines[3] == "3,0.75,0.25"
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="speaker").click()
    await expect(legend).to_have_text("reward 0.25")
    await tab.go("jobs", job, "checkpoints")
    await expect(tab.page.locator("tbody td").first).to_have_text("3")
    await tab.shows(f"opentinker download {job} DIR --policy speaker")
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="listener").click()
    await expect(tab.page.locator("tbody td").first).to_have_text("6")
    await expect(tab.page.get_by_role("button", name="Continue training")).to_have_count(0)
    assert len(await saved(tab, "Download")) > len(b"weights")


def played(seat: str, sees: str, says: str, turn: int, version: str) -> dict[str, Any]:
    words = {"role": "assistant", "content": says, "turn": turn, "tokens": [1, 2], "versions": [version], "reward": 0.5}
    return {
        **{"seat": seat, "stream": "", "policy": seat, "reward": 0.5},
        "messages": [{"role": "user", "content": sees}, words],
        "tokens": {
            **{"text": [sees, says], "ids": [4, 5], "mask": [0, 1], "logprobs": [0, -0.7], "left_out": 0},
            **{"advantages": [0, 1.5] if seat == "speaker" else None, "versions": [[1, 2, version]]},
        },
    }


def write_match(ctx: Context, job: str) -> None:
    """One training episode of both policies, as the speaker's trainer keeps it."""
    episode: dict[str, Any] = {
        **{"step": 3, "group": 7, "sample": 0, "environment": "signalling", "worker": "r-0", "versions": ["1.2"]},
        **{"reward": 0.5, "rewards": {"speaker": 0.5}, "group_rewards": {"speaker": [0.5, 0.0]}, "components": {}},
        **{"scores": {}, "metrics": {"exact": 1.0}, "ending": "env_done", "stops": ["eos"], "tokens": 1, "turns": 1},
        **{"seconds": 0.1, "order": [[0, 0], [0, 1], [1, 0], [1, 1]]},
        "views": [played("speaker", "say 3", "q", 0, "1.2"), played("listener", "heard q", "3", 1, "1.5")],
    }
    folder = ctx.settings.data_dir / "jobs" / f"{job}~speaker" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "step-000003.jsonl").write_bytes(orjson.dumps(episode) + b"\n")


async def test_a_match_is_a_conversation_of_its_seats_with_the_version_of_each_policy(
    opened: Open, http: Http, bus: Bus, ctx: Context
) -> None:
    job = await new_game(http, bus, ctx)
    write_match(ctx, job)
    tab = await opened(http.url, "jobs", job, "episodes")
    messages = tab.page.locator(".match .message")
    await expect(messages.locator(".words")).to_have_text(["say 3", "q", "heard q", "3"])
    heads = ["to speaker · user", "speaker · weights speaker 1.2 · reward 0.5"]
    heads += ["to listener · user", "listener · weights listener 1.5 · reward 0.5"]
    await expect(messages.locator("small").first).to_have_text(heads[0])
    assert await messages.locator("> small").all_text_contents() == heads
    await tab.page.get_by_role("button", name="version", exact=True).click()
    colours = [
        await messages.nth(place).locator(".tokens span").evaluate("e => e.style.background") for place in (1, 3)
    ]
    assert len(set(colours)) == 2, "each policy's version has a colour"
    await tab.page.locator(".tokens span", has_text="3").click()
    await tab.shows("weights listener 1.5")
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="listener").click()
    await tab.shows("No episodes yet")


async def test_words_of_others_stay_words(opened: Open, http: Http, ctx: Context, store: Store, bus: Bus) -> None:
    spec = {**SPEC, "rollout": {"max_tokens": 8, "stop": [PAYLOAD]}}
    status, body = await http.submit(spec)
    assert status == 201, body
    job = body["id"]
    home = ctx.settings.data_dir / "jobs" / job
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
    for _ in range(20):
        await tab.page.keyboard.press("Tab")
        if await tab.page.evaluate("document.activeElement.getAttribute('href')") == f"#/jobs/{job}":
            break
    await tab.page.keyboard.press("Enter")
    await expect(value(tab, "Reward")).to_have_text("0.5")


PARTS = ("curves", "timeline", "episodes", "data", "log", "config", "checkpoints")


# --- live, with real services ---------------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_a_real_run_is_seen_live_through_a_restart_of_nats(opened: Open, tmp_path: Path) -> None:
    """And nobody hears another job with a credential of their own."""
    async with toy_cluster(tmp_path, rollout_workers=2) as (cluster, model):
        train = {"learner": "simulated", "steps": 100_000, "simulated_step_s": 0.1}
        job, other = [await cluster.submit(make_spec(model__base=str(model), train=train)) for _ in range(2)]
        await cluster.reaches(job, 3)
        tab = await opened(f"http://127.0.0.1:{cluster.http_port}", "jobs", job)
        signal = tab.page.locator(".signal")
        await expect(signal).to_have_attribute("data-way", "live")
        await of_its_pipeline(tab, job)
        await tab.go("jobs", job)
        await moves(tab)
        asked = len(tab.asked)
        await moves(tab)
        assert not [url for url in tab.asked[asked:] if "/metrics" in url], "it hears, and does not ask"
        await cluster.stop("nats", signal_of.SIGKILL)
        await expect(signal).to_have_attribute("data-way", "joining")
        cluster.start("nats")
        began = time.monotonic()
        await expect(signal).to_have_attribute("data-way", "live")
        took = time.monotonic() - began
        print(f"live again after {took:.1f} s", end=" ")
        assert took <= LIVE_AGAIN_S
        await moves(tab)
        await expect(signal).to_have_text(WHOLE)
        lines = (await saved(tab, "Reward as CSV")).decode().splitlines()[1:]
        lost = re.search(r"\d+", str(await signal.text_content()))  # a server that is killed may lose the last word
        steps = [int(line.split(",")[0]) for line in lines]
        absent = set(range(1, max(steps) + 1)) - set(steps)
        assert len(steps) == len(set(steps)) and len(absent) <= int(lost[0] if lost else 0)

        async def foreign(route: Route) -> None:
            """What the page asks for is another job; what it is given hears this one."""
            answer = await route.fetch(url=f"{tab.url}/v1/jobs/{job}/stream-credentials")
            said = (await answer.text()).replace(f"metric.{job}", f"metric.{other}")
            await route.fulfill(response=answer, body=said)

        await tab.page.route(f"**/v1/jobs/{other}/stream-credentials", foreign)
        await tab.go("jobs", other)
        await expect(signal).to_have_attribute("data-way", "polling")
        await expect(signal).to_contain_text(re.compile("permission", re.IGNORECASE))


@pytest.mark.nightly
async def test_a_real_game_of_two_policies_is_seen_whole(opened: Open, tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        spec: dict[str, Any] = {
            "name": "pennies",
            "model": {"base": str(model), "chat_template": "plain"},
            "environment": {"name": "matching_pennies"},
            "algorithm": {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1},
            "rollout": {"engine": "toy", "max_tokens": 4, "transcripts": 2},
            "train": {"learner": "simulated", "steps": 8, "simulated_step_s": 0.05},
            "policies": {"a": {}, "b": {}},
            "seats": {"even": "a", "odd": "b"},
            "validation": {"every": 4, "episodes": 4, "against": [{"bot": "heads"}, {"policy": "b"}]},
        }
        job = await cluster.submit(parse_spec(spec))
        await cluster.succeeds(job)
        tab = await opened(f"http://127.0.0.1:{cluster.http_port}")
        await tab.go("jobs", job)
        reward_lines = ["a reward", "a validation", "b reward", "b validation"]
        for chart, lines in {"Reward": reward_lines, "Rating": ["a", "b"], "Staleness": ["a", "b"]}.items():
            await expect(tab.page.locator(f'[data-chart="{chart}"] .legend .key')).to_contain_text(lines)
        await expect(tab.page.locator(".top [data-policy=b]")).to_contain_text("8 / 8")
        row = tab.page.get_by_role("region", name="Win rates").locator("tbody tr").first
        await expect(row).to_contain_text("a50%")
        await tab.go("jobs", job, "episodes")
        heads = tab.page.locator(".match").first.locator(".message > small")
        await expect(heads).to_have_count(4)
        said = await heads.all_text_contents()
        assert [text.split(" ·")[0] for text in said] == ["to even", "even", "to odd", "odd"]
        assert "weights a 1." in said[1] and "weights b 1." in said[3]
        await tab.page.get_by_role("button", name="evaluations", exact=True).click()
        await tab.shows("Against")


@pytest.mark.nightly
async def test_a_checkpoint_is_talked_to(opened: Open, tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        train = {"learner": "simulated", "steps": 3}
        job = await cluster.run(make_spec(model__base=str(model), train=train))
        tab = await opened(f"http://127.0.0.1:{cluster.http_port}", "jobs", job)
        await expect(tab.page.locator(".signal")).to_have_attribute("data-way", "ended")
        await expect(tab.page.locator('[data-chart="Reward"] .tools small')).to_have_text("step 3")
        await tab.go("jobs", job, "checkpoints")
        assert (await saved(tab, "Download")).startswith(b"manifest.json")
        await tab.page.get_by_role("button", name="Chat with this").first.click()
        await tab.page.get_by_label("Message").fill("123=")
        await tab.page.get_by_role("button", name="Send").click()
        answer = tab.page.locator(".chat .message.assistant .words")
        await expect(answer).to_have_text(re.compile("[a-z0-9]+"))
        await expect(tab.page.get_by_role("button", name="Send")).to_be_visible(timeout=WAIT_S * 1000)
        await cluster.client.cancel((await cluster.client.jobs())[0]["id"])
        await its_adapter_is_asked(tab, cluster, model)


async def its_adapter_is_asked(tab: Tab, cluster: Cluster, base: Path) -> None:
    trained = await new_job(
        cluster.store, "j-maths00000", JobState.SUCCEEDED, model={"base": str(base)}, train={"steps": 1}
    )
    surroundings: Any = SimpleNamespace(settings=SimpleNamespace(data_dir=cluster.data))
    files = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"weights"}
    write_checkpoint(surroundings, trained, 1, files)
    serving = {"adapters": [{"name": "maths", "from": f"{trained}@1"}]}
    spec = {"name": "talk", "kind": "inference", "model": {"base": str(base)}, "rollout": {"engine": "toy"}}
    job = (await cluster.client.submit({**spec, "serving": serving}))["id"]
    await cluster.runs(job)
    await tab.go("jobs", job, "chat")
    await tab.page.get_by_label("Model").select_option("maths")
    await tab.page.get_by_label("Message").fill("123=")
    async with tab.page.expect_request("**/v1/chat/completions") as asked:
        await tab.page.get_by_role("button", name="Send").click()
    said: Any = (await asked.value).post_data_json
    assert said["model"] == "maths"
    answer = tab.page.locator(".chat .message.assistant .words")
    await expect(answer).to_have_text(re.compile("[a-z0-9]+"))


async def of_its_pipeline(tab: Tab, job: str) -> None:
    """What its workers are busy with, and the tokens that it is made of."""
    await tab.go("jobs", job, "timeline")
    for lane in ("training", "generation", "swap"):
        await expect(tab.page.locator(f'[data-lane="{lane}"]').first).to_contain_text("%")
    played = tab.page.locator('[data-lane="env"]').filter(has_text="env_worker-0")
    await expect(played).to_contain_text("%")
    await tab.page.locator(".timeline canvas").press("ArrowLeft")
    await expect(tab.page.locator(".timeline .chosen")).to_contain_text(re.compile(r"of [a-z]+-0: [a-z]+ \d+ ms"))
    await tab.go("jobs", job, "episodes")
    for colour in ("version", "logprob", "mask"):
        await tab.page.get_by_role("button", name=colour, exact=True).click()
        sampled = tab.page.locator('.tokens span[title*="weights 1."]').first
        await expect(sampled).to_have_css("background-color", re.compile("rgb|color"))
    await tab.page.get_by_label("follow the newest").uncheck()  # else the next step takes the place of what is chosen
    await tab.page.locator(".tokens").first.press("End")
    await expect(tab.page.locator(".tokens + .chosen").first).to_contain_text(re.compile(r"token \d+, "))
    await expect(tab.page.locator('.rewards[aria-label^="rewards"]').first).to_be_visible()


async def moves(tab: Tab) -> None:
    """Until the curves have reached a later step."""
    shown = tab.page.locator('[data-chart="Reward"] .tools small')
    await expect(shown).to_have_text(re.compile(r"step \d+"))
    await expect(shown).not_to_have_text(str(await shown.text_content()))


# --- what is done ---------------------------------------------------------------------------------------------------


async def test_checks_of_environments_are_listed_and_opened(opened: Open, http: Http) -> None:
    report: Any = {
        "environment": "harbor:mine", "verdict": "1 of 2 tasks cannot be trained yet", "errors": ["b: it is <flaky>"],
        "advice": [], "facts": {"start": "70 ms"}, "transcript": "", "columns": ["task", "solution"],
        "rows": [["a", "1"], ["b", "0.5"]],
    }  # fmt: skip
    async with AsyncClient(http.url, api_key=OPERATOR) as client:
        await client.save_check(report)
    tab = await opened(http.url, "environments")
    await tab.page.get_by_role("link", name="harbor:mine").click()
    for text in ("1 of 2 tasks cannot be trained yet", "b: it is <flaky>", "70 ms", "0.5"):
        await tab.shows(text)


async def test_the_http_api_is_read_and_tried_in_the_page(opened: Open, http: Http) -> None:
    tab = await opened(http.url)
    await tab.page.goto(f"{http.url}/docs")
    await expect(tab.page.locator(".swagger-ui .info .title")).to_contain_text("OpenTinker")
    await tab.page.get_by_placeholder("Filter by tag").wait_for()
    operation = tab.page.locator(".opblock", has_text="/v1/whoami").first
    await operation.locator(".opblock-summary-control").click()
    await operation.get_by_role("button", name="Try it out").click()
    await operation.get_by_role("button", name="Execute").click()
    await expect(operation.locator(".live-responses-table .microlight").first).to_contain_text('"role"')


async def test_jobs_are_listed_by_project_tag_and_order(opened: Open, http: Http) -> None:
    named = {"a-first": ["small"], "b-second": ["small", "seed 2"], "c-third": []}
    for name, tags in named.items():
        await http.job({**SPEC, "name": name, "project": "maths" if tags else "", "tags": tags})
    tab = await opened(http.url)
    rows, bar = tab.page.locator(".jobs tbody tr"), tab.page.locator(".bar")
    await expect(rows.first).to_contain_text("c-third")
    await tab.page.get_by_label("Order").select_option("name")
    await expect(rows.first).to_contain_text("a-first")
    await rows.first.get_by_role("button", name="maths").click()
    await expect(rows).to_have_count(2)
    await rows.nth(1).get_by_role("button", name="seed 2").click()
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("b-second")
    await bar.get_by_role("button", name="tag: seed 2").click()
    await expect(rows).to_have_count(2)
    await bar.get_by_role("button", name="project: maths").click()
    await expect(rows.nth(2)).to_contain_text("c-third")


async def test_jobs_are_picked_by_mouse_and_keys_and_done_with_together(opened: Open, http: Http, bus: Bus) -> None:
    jobs = [
        await http.job({**SPEC, "name": name, "train": {"steps": steps}})
        for name, steps in (("a", 5), ("b", 7), ("c", 7))
    ]
    for job, mean in zip(jobs, (0.25, 0.5, 0.75), strict=True):
        for step in (1, 2):
            await Trainer(bus, job).says(step, reward(mean * step / 2))
    tab = await opened(http.url)
    await tab.page.get_by_label("Order").select_option("name")
    rows, bulk = tab.page.locator(".jobs tbody tr"), tab.page.get_by_role("toolbar", name="Chosen jobs")
    assert all(
        box is not None and box["height"] <= 36.5 for box in [await rows.nth(n).bounding_box() for n in range(3)]
    )
    await tab.page.get_by_label("Pick a", exact=True).check()
    await tab.page.get_by_label("Pick c", exact=True).click(modifiers=["Shift"])
    await expect(bulk).to_contain_text("3 jobs chosen")
    await bulk.get_by_label("Tag to add").fill("mine")
    await bulk.get_by_label("Tag to add").press("Enter")
    await expect(rows.filter(has_text="mine")).to_have_count(3)
    await tab.page.locator("body").click(position={"x": 2, "y": 2})
    for key in ("j", "x", "j", "x", "?"):
        await tab.page.keyboard.press(key)
    await expect(bulk).to_contain_text("2 jobs chosen")
    await tab.shows("c compares")
    await tab.page.keyboard.press("a")
    await tab.page.keyboard.press("c")
    await tab.page.wait_for_url("**/#/compare/**")
    table = tab.page.locator("table.compared")
    await expect(table.locator("thead")).to_contain_text("train.steps")
    await expect(table.locator("tbody tr").first).to_contain_text("0.25")
    await expect(tab.page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("c j-")
    await tab.page.get_by_label("Group by").select_option("train.steps")
    await expect(tab.page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("7 (2)")
    other = await opened(http.url)
    await other.page.goto(tab.page.url)
    await expect(other.page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("7 (2)")
    text = (await saved(tab, "CSV", exact=True)).decode()
    assert text.splitlines()[0].startswith("id,name,train.steps,reward/mean best") and len(text.splitlines()) == 4
    text = (await saved(tab, "HTML")).decode()
    assert "data:image/png" in text and "7 (2)" in text and "<script" not in text
    await tab.go("compare", f"{jobs[0]},j-missing")
    await tab.shows("no job 'j-missing'")
    await expect(table.locator("tbody tr")).to_have_count(1)
    await tab.go()
    await tab.page.get_by_label("Pick all").check()
    await tab.page.keyboard.press("Escape")
    await expect(bulk).to_have_count(0)
    await tab.page.keyboard.press("a")
    refused = {"detail": "it is busy", "status": 409}
    await tab.page.route(f"**/v1/jobs/{jobs[0]}/cancel", lambda route: route.fulfill(status=409, json=refused))
    await bulk.get_by_role("button", name="Cancel").click()
    await expect(rows.filter(has_text="cancelled")).to_have_count(2)
    await expect(bulk).to_contain_text("1 of 3 refused, which are still chosen: it is busy")
    await expect(bulk).to_contain_text("1 job chosen")


async def test_of_many_jobs_those_in_sight_are_drawn(opened: Open, http: Http, store: Store) -> None:
    for n in range(450):
        await store.create_job(
            id=f"j-{n:010}", spec=make_spec(name=f"job {n}").model_dump(mode="json"), tenant="default"
        )
    tab = await opened(http.url)
    rows = tab.page.locator(".jobs tbody tr:not(.space)")
    await tab.shows("the first 200 jobs")
    await tab.page.get_by_role("button", name="More jobs").click()
    await tab.shows("the first 400 jobs")
    assert await rows.count() < 100
    await tab.page.evaluate("window.scrollTo(0, 36 * 300)")
    await expect(rows.filter(has_text="job 150")).to_have_count(1)
    assert await rows.count() < 100
    await tab.page.get_by_label("Search jobs").fill("job 449")
    await expect(rows).to_have_count(1)
