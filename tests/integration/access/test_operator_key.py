"""The operator's first key, where clients find it, and servers that ask for none."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from opentinker.local.discovery import key_for
from opentinker.local.up import Plan, locked, operator_key
from opentinker.sdk.client import AsyncClient
from opentinker.sdk.http import ApiError, api_key
from opentinker.services.scheduler.http.auth import CACHE_S, register_operator
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import new_key, parse, read_key, write_key
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import OpenTinkerError, SpecError
from tests.support.api import OPERATOR, Http, bearing
from tests.support.scheduling import scheduler

NOTHING_GIVEN = ("OPENTINKER_API_KEY", "OPENTINKER_API_KEY_FILE", "OPENTINKER_ADMIN_KEY_FILE", "OPENTINKER_URL")


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NOTHING_GIVEN:
        monkeypatch.delenv(name, raising=False)


# --- the first key of all -------------------------------------------------------------------------------------------


async def test_a_server_nobody_could_ask_does_not_start(ctx: Context, store: Store) -> None:
    named = ctx.settings
    ctx.settings = named.model_copy(update={"admin_key_file": None})
    with pytest.raises(SpecError, match="opentinker keys init FILE"):
        await register_operator(ctx)
    ctx.settings = named
    await register_operator(ctx)
    ctx.settings = named.model_copy(update={"admin_key_file": None})
    await register_operator(ctx)  # there is one now
    ctx.settings = named.model_copy(update={"key_env": "prod"})
    with pytest.raises(SpecError, match="a key of 'local', and key_env is 'prod'"):
        await register_operator(ctx)


async def test_a_revoked_operator_key_stays_revoked(api: Http, ctx: Context, store: Store) -> None:
    assert (await api("GET", "/v1/workers", headers=bearing()))[0] == 200
    await KeyStore(store.redis).revoke((parse(OPERATOR) or ("", ""))[1], now=time.time())
    await register_operator(ctx)
    await asyncio.sleep(CACHE_S)
    assert (await api("GET", "/v1/workers", headers=bearing()))[0] == 401


@pytest.mark.parametrize("content", [None, b"", b"short", b"0123456789abcdef" * 4, b"\xff" * 40])
def test_a_file_that_holds_no_key_is_refused_at_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match="admin_key_file"):
        read_key(file)


@pytest.mark.usefixtures("nothing_given")
def test_up_makes_a_key_that_its_owner_alone_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    path = operator_key(Plan(data_dir=tmp_path))
    assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_key(path)
    assert operator_key(Plan(data_dir=tmp_path, host="0.0.0.0")) == path and read_key(path) == key
    monkeypatch.setenv("OPENTINKER_KEY_ENV", "prod")
    with pytest.raises(OpenTinkerError, match="a key of 'local', and key_env is 'prod'"):
        operator_key(Plan(data_dir=tmp_path))
    monkeypatch.setenv("OPENTINKER_ADMIN_KEY_FILE", str(tmp_path / "own"))
    assert operator_key(Plan(data_dir=tmp_path)) == tmp_path / "own"


@pytest.mark.usefixtures("nothing_given")
def test_the_key_that_is_made_at_the_first_start_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, terminal in (("a", True), ("b", False)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        (tmp_path / name / "run").mkdir(parents=True)
        paths = [operator_key(Plan(data_dir=tmp_path / name)) for _ in range(2)]
        assert paths[0] is not None
        shown = capsys.readouterr()
        assert read_key(paths[0]) not in shown.out + shown.err


# --- without keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_no_server_listens_for_others_without_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="auth = false is refused"):
        load_settings(None, {"OPENTINKER_HTTP_HOST": host, "OPENTINKER_AUTH": "false"})
    assert load_settings(None, {"OPENTINKER_HTTP_HOST": host}).auth
    with pytest.raises(OpenTinkerError, match="--no-auth is refused"):
        operator_key(Plan(data_dir=tmp_path, host=host, auth=False))


@pytest.fixture
async def without(ctx: Context) -> AsyncIterator[Http]:
    """A server that asks for no keys."""
    ctx.settings = ctx.settings.model_copy(update={"auth": False, "admin_key_file": None})
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        yield Http(session, url)


PAGES = [
    ({"Origin": "http://evil.example"}, "rejects requests of other sites"),
    ({"Origin": "http://localhost:3000"}, "rejects requests of other sites"),
    ({"Origin": "null"}, "rejects requests of other sites"),
    ({"Host": "evil.example"}, "requires no key"),
    ({"Host": "127.0.0.1.evil.example:8080", "Origin": "http://127.0.0.1.evil.example:8080"}, "requires no key"),
    ({"Host": "[::1"}, "requires no key"),
]


@pytest.mark.parametrize(("headers", "why"), PAGES)
async def test_a_server_without_keys_refuses_other_sites(without: Http, headers: dict[str, str], why: str) -> None:
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/healthz")):
        status, body = await without(method, path, headers=headers)
        assert status == 403 and why in body["detail"]


async def test_a_server_without_keys_says_so_and_answers_its_own_pages_and_programs(without: Http) -> None:
    port = without.url.rpartition(":")[2]
    for headers in ({}, {"Origin": without.url}, {"Host": f"localhost:{port}"}, {"Host": f"[::1]:{port}"}):
        assert (await without("GET", "/v1/workers", headers=headers))[0] == 200
    assert (await without("GET", "/healthz"))[1]["auth"] == "off"
    async with without.session.get(f"{without.url}/v1/jobs") as response:
        assert response.headers["X-OpenTinker-Auth"] == "off"


# --- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_given")
async def test_the_client_finds_its_key(api: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(key: str | None = None) -> None:
        async with AsyncClient(api.url, api_key=key) as client:
            assert await client.jobs() == []

    await ask(OPERATOR)
    with pytest.raises(ApiError, match="API key required; set OPENTINKER_API_KEY") as refused:
        await ask()
    assert refused.value.status == 401
    monkeypatch.setenv("OPENTINKER_API_KEY_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(OpenTinkerError, match="OPENTINKER_API_KEY_FILE"):
        await ask()
    write_key(tmp_path / "key", OPERATOR)
    monkeypatch.setenv("OPENTINKER_API_KEY_FILE", str(tmp_path / "key"))
    await ask()
    monkeypatch.setenv("OPENTINKER_API_KEY", new_key("local"))
    with pytest.raises(ApiError, match="unknown API key"):
        await ask()


@pytest.mark.usefixtures("nothing_given")
def test_in_the_directory_of_a_running_server_its_key_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENTINKER_DATA_DIR", raising=False)
    home = tmp_path / "runs" / "one"
    url = "http://127.0.0.1:8123"
    with locked(home):
        path = operator_key(Plan(data_dir=home))
        state = {"url": url, "admin_key_file": str(path)}
        (home / "run" / "state.json").write_bytes(msgspec.json.encode(state))
        assert path is not None
        for same in (url, "http://localhost:8123", f"{url}/v1/jobs/j-0123456789"):
            assert api_key(same) == key_for(same) == read_key(path)
        for other in (
            "http://127.0.0.1:8124",
            "https://127.0.0.1:8123",
            "http://example.org:8123",
            "nonsense",
            "http://[",
            "http://x:y",
        ):
            assert key_for(other) == ""
        monkeypatch.setenv("OPENTINKER_API_KEY", "mine")
        assert api_key(url) == "mine"
    assert key_for(url) == ""  # it runs no more
