"""Interfaces for other tools: the AsyncAPI document, example subscribers, Prometheus and Grafana."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import orjson
import promql_parser
import pytest
import yaml
from aiohttp import web

from opentinker.envs.runtime import sessions as _env_worker  # noqa: F401 - what they count is in the registry
from opentinker.services.scheduler import service as _scheduler  # noqa: F401
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging import asyncapi
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.permissions import TABLE
from opentinker.shared.messaging.subjects import METRIC, Subject
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import LAST, REGISTRY
from opentinker.shared.state.store import Store
from opentinker.shared.types.telemetry import LogLine, Segment, TimelinePart
from tests.conftest import Server, soon, until
from tests.e2e.page.conftest import CHROMIUM
from tests.support.api import OPERATOR, Http, bearing
from tests.support.cluster import ROOT
from tests.support.factories import make_point
from tests.support.http_server import http_server
from tests.support.lineage import undocumented
from tests.support.scheduling import running, scheduler
from tests.support.streams import guarded_context, guarded_nats

EXAMPLES = ROOT / "examples" / "subscribers"
API = "http://127.0.0.1:8080"
"""Which the page asks until somebody writes another one into it."""
SPECIFICATION = ROOT / "dashboard" / "node_modules" / "@asyncapi" / "specs" / "schemas" / "3.0.0.json"
OBSERVABILITY = ROOT / "deploy" / "observability"


# --- AsyncAPI -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(asyncapi.written())
    return found


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="AsyncAPI's own schema comes with: make dashboard")
def test_the_document_is_what_asyncapi_says_a_document_is(document: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(orjson.loads(SPECIFICATION.read_bytes())).validate(document)


def test_every_subject_is_in_the_document_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    addresses = {channel["address"] for channel in document["channels"].values()} - {None}
    assert addresses == {subject.pattern for subject in TABLE}
    open_to_pages = {c["address"] for c in document["channels"].values() if {"name": "dashboard"} in c.get("tags", [])}
    assert open_to_pages == {s.pattern for s in TABLE if isinstance(s, Subject) and s.shown}
    for reference in set(re.findall(r'"\$ref": ?"#/([^"]+)"', json.dumps(document))):
        here: Any = document
        for part in reference.split("/"):
            here = here[part]
    assert all(channel.get("description") for name, channel in document["channels"].items() if "REPLY" not in name)
    segment = document["components"]["schemas"]["Segment"]["properties"]
    assert segment["lane"]["description"].startswith("generation | env")
    chunk = document["components"]["schemas"]["GenerateChunk"]["properties"]
    assert all(chunk[field].get("description") for field in ("seq", "tokens")), "of the struct, and an inherited one"


@pytest.mark.parametrize(
    "message",
    [
        make_point("j", 1, {"loss": 1.0}),
        LogLine(job="j", service="s", worker="w", level="info", time=1.0, event="e"),
        TimelinePart(
            job="j", worker="w", incarnation="i", seq=0, segments=[Segment(lane="env", kind="k", start=1.0, end=2.0)]
        ),
    ],
    ids=["metric", "log", "timeline"],
)
def test_messages_are_what_the_document_says(document: dict[str, Any], message: msgspec.Struct) -> None:
    name = type(message).__name__
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    validator = jsonschema.Draft7Validator(schema)
    said = orjson.loads(msgspec.json.encode(message))
    assert list(validator.iter_errors(said)) == []
    assert list(validator.iter_errors({**said, "job": 7})) != []


# --- subscribers ----------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """Somebody's site, with the page in it: `api` is the address that they have written into it."""

    origin: str = ""
    api: str = ""

    async def page(self, _: web.Request) -> web.Response:
        text = (EXAMPLES / "live.html").read_text()
        assert text.count(API) == 1
        return web.Response(text=text.replace(API, self.api), content_type="text/html")


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    lab = Lab()
    async with http_server(web.get("/live.html", lab.page)) as lab.origin:
        yield lab


@pytest.fixture
async def site(valkey_server: Server, store: Store, tmp_path: Path, lab: Lab) -> AsyncIterator[tuple[str, Context]]:
    """URL of a scheduler that pages of the lab may ask, and its surroundings. Its NATS server refuses no page."""
    with guarded_nats(tmp_path) as guarded:
        async with (
            guarded_context(guarded, valkey_server, store, tmp_path / "data", http_origins=[lab.origin]) as ctx,
            scheduler(ctx) as lab.api,
        ):
            yield lab.api, ctx


def logins() -> float:
    return REGISTRY.get_sample_value("opentinker_stream_logins_total", {"let_in": "yes"}) or 0.0


async def submitted(url: str) -> str:
    async with aiohttp.ClientSession(headers=bearing()) as session:
        return await Http(session, url).job()


@asynccontextmanager
async def talking(bus: Bus, job: str) -> AsyncIterator[None]:
    """Somebody says a metric again and again."""

    async def talk() -> None:
        for step in itertools.count():
            await bus.emit(METRIC, make_point(job, step, {"loss": 0.25}), job=job, source="trainer")
            await bus.flush()
            await sleep(0.05)  # nats-py may swallow a cancellation on Python 3.11

    async with running(talk()):
        yield


def test_the_subscribers_are_short() -> None:
    for file in EXAMPLES.iterdir():
        if file.is_file():
            assert len(file.read_text().splitlines()) <= 22, file.name


async def test_the_python_subscriber_prints_events(site: tuple[str, Context]) -> None:
    """And goes on when its credential is over."""
    url, ctx = site
    ctx.settings = ctx.settings.model_copy(update={"stream_credential_s": 2.0})
    before = logins()
    job = await submitted(url)
    environment = {**os.environ, "OPENTINKER_API_KEY": OPERATOR}
    process = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLES / "live.py", job, url, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    try:
        async with talking(ctx.bus, job):
            while not (line := await soon(process.stdout.readline())).startswith(b"metric."):
                assert line, "it has ended"
            while logins() < before + 2:
                assert await soon(process.stdout.readline()), "it has ended"
            assert await soon(process.stdout.readline())
        subject, _, said = line.decode().partition(" ")
        assert subject == f"metric.{job}.trainer" and orjson.loads(said)["values"] == {"loss": 0.25}
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: make browser (as root, on Debian)")
async def test_the_subscriber_in_a_browser_shows_what_happens(site: tuple[str, Context], lab: Lab) -> None:
    """The page of a site of its own, without a proxy."""
    from playwright.async_api import async_playwright

    url, ctx = site
    job = await submitted(url)
    async with async_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = await browser.new_page()
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept(OPERATOR)))
        async with talking(ctx.bus, job):
            await page.goto(f"{lab.origin}/live.html#{job}")

            async def shown() -> list[dict[str, Any]]:
                lines = (await page.inner_text("pre")).splitlines()
                return [orjson.loads(line) for line in lines]

            await until(shown, lambda found: len(found) >= 3)
        points = [line for line in await shown() if "values" in line]
        assert points and all(point["job"] == job and point["values"] == {"loss": 0.25} for point in points)
        await browser.close()


# --- Prometheus and Grafana -----------------------------------------------------------------------------------------


def grafana_board() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((OBSERVABILITY / "grafana" / "dashboards" / "opentinker.json").read_bytes())
    return found


def board_targets() -> list[dict[str, Any]]:
    return [target for panel in grafana_board()["panels"] for target in panel.get("targets", [])]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"].keys() == {"summary", "description"}
        promql_parser.parse(rule["expr"])
    scraped = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    assert scraped["rule_files"] == ["alerts.yml"]


def test_every_metric_of_a_panel_or_an_alert_exists() -> None:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    known = {family.name + suffix for family in REGISTRY.collect() for suffix in suffixes[family.type]}
    board = grafana_board()
    expressions = [rule["expr"] for rule in board_targets() + alerts()]
    assert len(expressions) > 40
    assert {name for text in expressions for name in re.findall(r"opentinker_\w+", text)} <= known
    named = {name for text in expressions for name in re.findall(r'name="([^"]+)"', text)}
    assert named and undocumented(named) == []
    families = {name for text in expressions for name in re.findall(r'name=~"([a-z]+/)', text)}
    assert families == {"workers/", "jobs/"} and undocumented(f"{family}X" for family in families) == []
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in board["panels"]}) == len(places)


def labels_of(name: str) -> set[str]:
    """That a metric of ours has, and those that Prometheus gives every series of a process."""
    (found,) = [collector for collector, names in REGISTRY._collector_to_names.items() if name in names]
    return {*getattr(found, "_labelnames", ()), "instance", "service"} | ({"le"} if name.endswith("_bucket") else set())


def test_every_label_of_a_panel_exists() -> None:
    """Also its values, where a panel names one: a counter of something rare is there before it has happened."""
    for target in board_targets():
        left: set[str] = set()
        for name, asked in re.findall(r"(opentinker_\w+)(?:\{([^}]*)\})?", target["expr"]):
            labels = labels_of(name)
            left |= labels
            matchers = dict(re.findall(r'(\w+)=~?"([^"]*)"', asked))
            assert matchers.keys() <= labels, target["expr"]
            if name != LAST._name and matchers:
                assert REGISTRY.get_sample_value(name, matchers) is not None, target["expr"]
        kept = [set(group.split(", ")) for group in re.findall(r"by \(([^)]*)\)", target["expr"])]
        assert all(group <= left for group in kept), target["expr"]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert shown <= (kept[0] if kept else left), target["legendFormat"]


def test_prometheus_understands_every_query() -> None:
    variables = {variable["name"] for variable in grafana_board()["templating"]["list"]}
    for target in board_targets():
        asked = re.sub(r"\$__\w+", "5m", target["expr"])  # Grafana's own, of which we use spans of time
        assert set(re.findall(r"\$(\w+)", asked)) <= variables
        promql_parser.parse(asked)
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum(rate(opentinker_metric[5m])")


def test_what_is_provisioned_fits_together() -> None:
    scraped = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    grafana = OBSERVABILITY / "grafana"
    (source,) = yaml.safe_load((grafana / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((grafana / "providers" / "opentinker.yml").read_text())["providers"]
    names = scraped[0]["dns_sd_configs"][0]["names"]
    assert set(names) == {"scheduler", "trainer", "rollout-worker", "reference-forward", "env-worker"}
    assert scraped[0]["honor_labels"] is True  # else a job's id would be the name of the scrape
    used = {panel["datasource"]["uid"] for panel in grafana_board()["panels"] if "datasource" in panel}
    assert used == {source["uid"]} and provider["type"] == "file"
