"""Who may ask the API: the token, from the file of `opentinker up` to the client."""

from __future__ import annotations

import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from opentinker.api_client import AsyncClient
from opentinker.cli.common import server_url
from opentinker.http import ApiError
from opentinker.services.scheduler.api import FREE, Api
from opentinker.services.scheduler.gateway import Gateway
from opentinker.services.scheduler.replicas import Replicas
from opentinker.shared.config import load_settings
from opentinker.shared.errors import OpenTinkerError, SpecError
from opentinker.shared.service import Context
from opentinker.up import Plan, token_file
from tests.api import Http
from tests.scheduling import scheduler

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENTINKER_TOKEN", "OPENTINKER_TOKEN_FILE", "OPENTINKER_API_TOKEN_FILE", "OPENTINKER_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def closed(ctx: Context, tmp_path: Path) -> AsyncIterator[Http]:
    """A scheduler with a token."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    ctx.settings = ctx.settings.model_copy(update={"api_token_file": file})
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        yield Http(session, url)


@pytest.mark.parametrize(
    "header", [None, TOKEN, f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN[:-1]}", "Bearer \xff\udcff"]
)
async def test_no_route_answers_without_the_token(closed: Http, ctx: Context, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("utf-8", "surrogateescape").decode("latin-1")}
    routes = [
        (route.method, re.sub(r"{\w+}", "x", route.path)) for route in Api(ctx, Gateway(ctx), Replicas(ctx)).routes
    ]
    assert len(routes) > 20
    for method, path in [*routes, ("GET", "/nowhere"), ("GET", "/healthz/../v1/jobs"), ("GET", "//healthz")]:
        status, body = await closed(method, path, headers=headers)
        if path in FREE:
            assert status == 200
        elif path.startswith("/v1/jobs/x/v1/"):  # as OpenAI's API says it
            assert status == 401 and "OPENTINKER_TOKEN" in body["error"]["message"], path
        else:
            assert (status, body["title"]) == (401, "Unauthorized") and "OPENTINKER_TOKEN" in body["hint"], path
            assert TOKEN not in str(body)


PAGES = [
    ({"Origin": "http://evil.example"}, "no pages of others"),
    ({"Origin": "http://localhost:3000"}, "no pages of others"),
    ({"Origin": "null"}, "no pages of others"),
    ({"Host": "evil.example"}, "api_token_file"),
    ({"Host": "127.0.0.1.evil.example:8080", "Origin": "http://127.0.0.1.evil.example:8080"}, "api_token_file"),
    ({"Host": "[::1"}, "api_token_file"),
]


@pytest.mark.parametrize(("headers", "why"), PAGES)
async def test_a_server_without_a_token_answers_no_page_of_another_site(
    http: Http, headers: dict[str, str], why: str
) -> None:
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/healthz")):
        status, body = await http(method, path, headers=headers)
        assert status == 403 and why in body["detail"]


async def test_its_own_pages_and_programs_are_answered(http: Http) -> None:
    port = http.url.rpartition(":")[2]
    for headers in ({}, {"Origin": http.url}, {"Host": f"localhost:{port}"}, {"Host": f"[::1]:{port}"}):
        assert (await http("GET", "/v1/jobs", headers=headers))[0] == 200


async def test_the_token_opens_every_route(closed: Http) -> None:
    for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN}"):
        status, body = await closed("GET", "/v1/jobs", headers={"Authorization": header})
        assert (status, body["jobs"]) == (200, [])


async def test_the_client_takes_the_token_from_its_variable_or_a_file(
    closed: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with AsyncClient(closed.url) as client:
            assert await client.jobs() == []

    with pytest.raises(ApiError, match="token") as refused:
        await ask()
    assert refused.value.status == 401
    monkeypatch.setenv("OPENTINKER_TOKEN_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(OpenTinkerError, match="OPENTINKER_TOKEN_FILE"):
        await ask()
    monkeypatch.setenv("OPENTINKER_TOKEN_FILE", str(tmp_path / "token"))
    await ask()
    monkeypatch.setenv("OPENTINKER_TOKEN", "x" * 32)
    with pytest.raises(ApiError, match="not the server's token"):
        await ask()


@pytest.mark.parametrize("content", [None, b"", b"short", b"with a space in it and long enough", b"\xff" * 40])
def test_a_file_that_holds_no_token_is_refused_at_start(ctx: Context, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    ctx.settings = ctx.settings.model_copy(update={"api_token_file": file})
    with pytest.raises(SpecError, match="api_token_file"):
        Api(ctx, Gateway(ctx), Replicas(ctx))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_no_server_listens_for_others_without_a_token(host: str) -> None:
    with pytest.raises(SpecError, match=r"api_token_file$"):
        load_settings(None, {"OPENTINKER_HTTP_HOST": host})
    assert load_settings(None, {"OPENTINKER_HTTP_HOST": host, "OPENTINKER_API_TOKEN_FILE": "t"}).http_host == host


def test_up_makes_a_token_where_others_may_ask_and_the_commands_here_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    assert token_file(Plan(data_dir=tmp_path)) is None
    path = token_file(Plan(data_dir=tmp_path, host="0.0.0.0"))
    assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text()
    assert len(token.strip()) == 64
    assert token_file(Plan(data_dir=tmp_path, host="0.0.0.0")) == path and path.read_text() == token
    monkeypatch.setenv("OPENTINKER_API_TOKEN_FILE", str(tmp_path / "own"))
    assert token_file(Plan(data_dir=tmp_path)) == tmp_path / "own"

    state = {"url": "http://127.0.0.1:1", "api_token_file": str(path)}
    (tmp_path / "run" / "state.json").write_bytes(msgspec.json.encode(state))
    monkeypatch.setattr("opentinker.up.is_running", lambda _: True)
    environ: dict[str, str] = {"OPENTINKER_DATA_DIR": str(tmp_path)}
    monkeypatch.setattr("opentinker.cli.common.os.environ", environ)
    assert server_url(None) == "http://127.0.0.1:1"
    assert environ["OPENTINKER_TOKEN_FILE"] == str(path)
