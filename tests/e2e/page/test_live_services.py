"""The page on whole clusters: live runs, a restart of NATS, and a checkpoint that is talked to."""

from __future__ import annotations

import re
import signal as signal_of
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.async_api import Route, expect

from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import JobState
from tests.conftest import WAIT_S
from tests.e2e.page.conftest import IN_BROWSER, Open, Tab
from tests.e2e.page.running_jobs import saved
from tests.support.api import write_checkpoint
from tests.support.cluster import Cluster, toy_cluster
from tests.support.factories import make_spec
from tests.support.scheduling import new_job

pytestmark = IN_BROWSER

WHOLE = re.compile(r"^\s*live\s*(· \d+ points? (is|are) nowhere any more)?\s*$")

LIVE_AGAIN_S = 15.0
"""5 is meant, of a machine that does nothing else."""


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
