"""The view that submits: an editor that knows the spec, templates, a form, and what the queue would do."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from playwright.async_api import Locator, TimeoutError, expect

from tests.conftest import until
from tests.e2e.page.conftest import IN_BROWSER, Open, Tab
from tests.integration.rollout_worker.env_workers import Workers, workers
from tests.support.api import SPEC, Http
from tests.support.factories import make_spec
from tests.support.sweeps import jobs_of

__all__ = ["workers"]
pytestmark = IN_BROWSER
PASTE = """(place, text) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  place.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
}"""


async def paste(tab: Tab, text: str) -> None:
    """Put a text in the place of the editor's."""
    content = tab.page.locator(".cm-content")
    await content.press("Control+a")
    await content.evaluate(PASTE, text)


async def hovered(tab: Tab, text: Locator, tooltip: Locator) -> None:
    """Point at a text until its tooltip is there. The editor closes tooltips when it checks the document once more, and
    opens none for a pointer that stays where it is."""

    async def shown() -> bool:
        await tab.page.mouse.move(0, 0)
        await text.hover()
        with contextlib.suppress(TimeoutError):
            await tooltip.wait_for(timeout=2000)
        return await tooltip.is_visible()

    await until(shown)


async def test_a_job_is_cloned_looked_at_submitted_paused_and_cancelled(opened: Open, http: Http) -> None:
    job = await http.job()
    tab = await opened(http.url, "jobs", job)
    await tab.page.get_by_role("button", name="Clone").click()
    spec = tab.page.locator(".cm-content")
    await expect(spec).to_contain_text('name = "test-again"')
    whole = await spec.inner_text()
    assert "group_size = 2" in whole and "weight_decay" not in whole, "what is as usual is left out"
    await paste(tab, whole.replace("group_size = 2", "group_size = -2"))
    await tab.page.get_by_role("button", name="Validate").click()
    await tab.shows("The job cannot run")
    await tab.shows("algorithm.group_size")
    await paste(tab, whole)
    await tab.page.get_by_role("button", name="Submit").click()
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("test-again")
    await tab.page.get_by_role("button", name="Pause").click()
    await expect(tab.page.locator(".top .state")).to_have_text("paused")
    await tab.page.get_by_role("button", name="Cancel").click()
    await expect(tab.page.locator(".top .state")).to_have_text("cancelled")
    await tab.go()
    await tab.page.get_by_label("State", exact=True).select_option("cancelled")
    rows = tab.page.locator(".jobs tbody tr")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("test-again")
    await tab.page.get_by_label("State", exact=True).select_option("")
    await tab.page.get_by_label("Search jobs").fill(f"{job} rl")
    await expect(rows.filter(has_text=job)).to_have_count(1)
    await expect(rows).to_have_count(1)


async def test_the_clone_of_a_sweeps_job_is_not_among_the_sweeps_jobs(opened: Open, http: Http) -> None:
    spec = {**SPEC, "tags": ["s-validation"], "sweep": {"parameters": {"train.lr": [1e-5]}}}
    status, sweep = await http("POST", "/v1/sweeps", json=spec)
    assert status == 201, sweep
    job = (await until(lambda: jobs_of(http, sweep["id"]), bool))[0]["id"]
    await http("PATCH", f"/v1/jobs/{job}", json={"name": "best"})
    tab = await opened(http.url, "jobs", job)
    await tab.page.get_by_role("button", name="Clone").click()
    written = tab.page.locator(".cm-content")
    await expect(written).to_contain_text('name = "best-again"')
    await expect(written).to_contain_text(re.compile(r'tags = \[\s*"s-validation"\s*\]'))
    assert sweep["id"] not in await written.inner_text()


async def test_toml_is_a_spec_too(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    await paste(tab, 'name = "of-toml"\nkind = "rl\n')
    await tab.page.get_by_role("button", name="Validate").click()
    await tab.shows("neither valid TOML nor JSON")
    await paste(tab, 'name = "of-toml"\nsteps = 3\n')
    await tab.page.get_by_role("button", name="Validate").click()
    await tab.shows("The job cannot run")


async def test_the_editor_knows_the_spec(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    spec, mark = tab.page.locator(".cm-content"), tab.page.locator(".cm-lint-marker-error")
    await paste(tab, 'name = "x"\n[train]\nstpes = 3\n')
    await expect(mark.first).to_be_visible()
    line = tab.page.locator(".cm-lintRange-error", has_text="stpes")
    await expect(line).to_be_visible()
    await hovered(tab, line, tab.page.locator(".cm-diagnostic", has_text="did you mean"))
    await paste(tab, 'name = "x"\n[train]\n')
    await tab.page.keyboard.press("Control+End")
    await tab.page.keyboard.type("warm")
    option = tab.page.locator(".cm-tooltip-autocomplete li", has_text="warmup_steps")
    await expect(option).to_be_visible()
    await option.click()
    await tab.page.keyboard.type(" = 5")
    await expect(spec).to_contain_text("warmup_steps = 5")
    setting = tab.page.locator(".cm-line", has_text="warmup_steps").get_by_text("warmup_steps")
    await hovered(tab, setting, tab.page.locator(".cm-hint", has_text="train.warmup_steps"))


async def test_the_editor_knows_the_environments_and_their_settings(opened: Open, http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    tab = await opened(http.url, "submit")
    option = tab.page.locator(".cm-tooltip-autocomplete li")
    for table, typed, wanted in (
        ("[environment]\n", 'name = "copy', '"copy_digits"'),
        ('[environment]\nname = "copy_digits"\n[environment.config]\n', "dig", "digits"),
        ("[sweep.parameters]\n", "train.l", "lr"),
    ):
        await paste(tab, table)
        await tab.page.keyboard.press("Control+End")
        await tab.page.keyboard.type(typed)

        async def suggested(wanted: str = wanted) -> bool:
            await tab.page.keyboard.press("Control+Space")  # once more: what the server has may come later
            with contextlib.suppress(TimeoutError):
                await option.filter(has_text=wanted).first.wait_for(timeout=2000)
            return await option.filter(has_text=wanted).count() > 0

        await until(suggested)


async def test_a_template_is_changed_in_the_form_and_looked_at_by_the_queue(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    templates = tab.page.locator(".templates li")
    for name, said in (
        ("bandit", "reward/mean to "),
        ("sweep_toy", "best exact of 10 trials: 1"),
        ("tinker/server", "programs that use the Tinker API train"),
        ("geometry3k", "reward/mean to 0 in 20 steps"),
        ("geometry3k", "it learns nothing"),
        ("eval", "ends with a table of results, not with a curve"),
    ):
        of_name = templates.filter(has=tab.page.get_by_role("button", name=name, exact=True))
        await expect(of_name).to_contain_text(said)
    await tab.page.get_by_role("button", name="bandit", exact=True).click()
    spec = tab.page.locator(".cm-content")
    await expect(spec).to_contain_text('name = "bandit"')
    model = tab.page.get_by_label("model.base")
    await model.fill("/no/such")
    await model.press("Tab")
    await tab.shows("1 mistake to correct first")
    await model.fill("some/model")
    await tab.page.get_by_label("train.steps").fill("77")
    await tab.page.get_by_label("train.steps").press("Tab")
    await expect(spec).to_contain_text('base = "some/model"')
    await expect(spec).to_contain_text("steps = 77")
    await tab.shows("it would wait for")
    await tab.shows("no similar job has run here")
    await tab.page.get_by_role("button", name="Submit").click()
    await expect(tab.page.get_by_role("heading", level=1)).to_have_text("bandit")


async def test_a_sweep_is_submitted_as_one(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    spec = make_spec(model__base="some/model").model_dump(mode="json", exclude_defaults=True)
    swept = {**spec, "kind": "sweep", "sweep": {"parameters": {"rollout.episode_timeout_s": [60, 90]}}}
    await paste(tab, json.dumps(swept))
    await tab.page.get_by_role("button", name="Submit").click()
    await tab.page.wait_for_url(re.compile("#/sweeps/s-"))


async def test_floats_of_the_text_reach_the_server(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    spec = make_spec(model__base="some/model").model_dump(mode="json", exclude_defaults=True)
    config = {**spec["environment"].get("config", {}), "scale": 1.0, "count": 1}
    job = {**spec, "environment": {**spec["environment"], "config": config}}
    swept = '"environment.config.t" = { low = 0.0, high = 1.0 }'
    text = f'{toml_of(job)}[sweep]\nmethod = "random"\ntrials = 8\n[sweep.parameters]\n{swept}\n'
    async with tab.page.expect_request(lambda request: request.url.endswith("scope=queue")) as asked:
        await paste(tab, text)
    assert (await asked.value).post_data == text
    await tab.page.get_by_role("button", name="Submit").click()
    await tab.page.wait_for_url(re.compile("#/sweeps/s-"))
    async with http.session.get(f"{http.url}/v1/sweeps/{tab.page.url.rpartition('/')[2]}") as answer:
        assert '"low":0.0,"high":1.0' in await answer.text()
    await tab.go("submit", await http.job(job))
    written = tab.page.locator(".cm-content")
    await expect(written).to_contain_text("scale = 1.0")
    await expect(written).to_contain_text("count = 1")


def toml_of(spec: dict[str, Any]) -> str:
    """The top level, each setting on a line, its tables inline."""

    def value(one: Any) -> str:
        if isinstance(one, dict):
            return f"{{ {', '.join(f'{name} = {value(part)}' for name, part in one.items())} }}"
        return json.dumps(one)

    return "".join(f"{name} = {value(one)}\n" for name, one in spec.items())


async def test_the_form_writes_beside_dotted_names_and_takes_out_what_is_cleared(opened: Open, http: Http) -> None:
    tab = await opened(http.url, "submit")
    await paste(tab, 'name = "x"\ntrain.lr = 1e-4\n')
    spec, steps = tab.page.locator(".cm-content"), tab.page.get_by_label("train.steps")
    await steps.fill("7")
    await steps.press("Tab")
    await expect(spec).to_contain_text("train.steps = 7")
    await expect(steps).to_have_value("7")
    await steps.fill("")
    await steps.press("Tab")
    await expect(spec).not_to_contain_text("train.steps")
    await expect(spec).to_contain_text("train.lr")
    await expect(steps).to_have_value("")
