"""Pages of other sites: those that the operator has named may ask, with the rights of a key, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from multidict import CIMultiDictProxy
from pydantic import ValidationError

from opentinker.local.up import page_origins
from opentinker.services.scheduler.http.cors import SHOWN, TAKEN
from opentinker.shared.config import Settings
from opentinker.shared.settings_sources import PREFIX
from tests.conftest import NewContext
from tests.support.api import bearing
from tests.support.scheduling import scheduler

LAB = "https://lab.example"
NAMED = [f"{LAB}:443", "http://localhost:8000"]
FOREIGN = ("https://evil.example", "http://lab.example", f"{LAB}:8443", f"{LAB}.evil.example", "null")
ALLOW = "Access-Control-Allow-"


@pytest.fixture
async def url(new_context: NewContext) -> AsyncIterator[str]:
    async with new_context(http_origins=NAMED) as ctx, scheduler(ctx) as url:
        yield url


async def asked(method: str, url: str, origin: str, **headers: str) -> tuple[int, CIMultiDictProxy[str]]:
    headers = {"Origin": origin, **headers}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as answer:
        return answer.status, answer.headers


def preflight(method: str = "POST") -> dict[str, str]:
    return {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization"}


async def test_a_named_page_may_ask_and_read_also_refusals(url: str) -> None:
    for origin in (LAB, NAMED[1]):
        status, headers = await asked("OPTIONS", url + "/v1/jobs", origin, **preflight())
        assert status == 204 and headers[ALLOW + "Origin"] == origin and headers[ALLOW + "Headers"] == TAKEN
        assert {"GET", "POST", "DELETE"} <= set(headers[ALLOW + "Methods"].split(", "))
    for given, wanted in ((bearing(), 200), ({}, 401)):
        status, headers = await asked("GET", url + "/v1/jobs", LAB, **given)
        assert status == wanted and headers[ALLOW + "Origin"] == LAB and headers["Vary"] == "Origin"
        assert headers["Access-Control-Expose-Headers"] == SHOWN
        assert ALLOW + "Credentials" not in headers


@pytest.mark.parametrize("origin", FOREIGN)
async def test_no_other_page_is_told_anything(url: str, origin: str) -> None:
    status, headers = await asked("OPTIONS", url + "/v1/jobs", origin, **preflight())
    assert status == 401 and not any(name.startswith(ALLOW) for name in headers)
    _, headers = await asked("GET", url + "/v1/jobs", origin, **bearing())
    assert not any(name.startswith(ALLOW) for name in headers) and headers["Vary"] == "Origin"


async def test_a_page_serves_no_environments_whoever_named_it(url: str) -> None:
    status, _ = await asked("GET", url + "/v1/served/mine", LAB, **bearing())
    assert status == 403


async def test_by_default_no_page_may_ask(new_context: NewContext) -> None:
    async with new_context() as ctx, scheduler(ctx) as url:
        for origin in (LAB, url):
            status, headers = await asked("OPTIONS", url + "/v1/jobs", origin, **preflight())
            assert status == 401 and not any(name.startswith(ALLOW) for name in headers)
        _, headers = await asked("GET", url + "/v1/jobs", LAB, **bearing())
        assert not any(name.startswith(ALLOW) for name in headers) and "Vary" not in headers


@pytest.mark.parametrize("wrong", ["*", "null", "lab.example", "https://lab.example/", "https://*.example"])
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match=r"is no https"):
        Settings(http_origins=[wrong])


def test_a_server_without_keys_names_no_pages() -> None:
    with pytest.raises(ValidationError, match="would be operators"):
        Settings.model_validate({"http_origins": LAB, "auth": False})


def test_named_pages_may_hear_live_what_they_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAB not in page_origins("127.0.0.1", 8080)
    monkeypatch.setenv(PREFIX + "HTTP_ORIGINS", LAB)
    assert page_origins("127.0.0.1", 8080)[-1] == LAB and "http://localhost:8080" in page_origins("127.0.0.1", 8080)
    assert page_origins("0.0.0.0", 8080) == (), "every page may"
    monkeypatch.setenv(PREFIX + "NATS_WEBSOCKET_ORIGINS", "https://api.example")
    assert page_origins("0.0.0.0", 8080) == ("https://api.example", LAB)
