"""Keys by HTTP, from Python and on the command line: made once, given on never, rotated and revoked."""

from __future__ import annotations

import asyncio
import re
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.client import AsyncClient
from opentinker.local.up import Plan, locked, operator_key
from opentinker.sdk.http import ApiError
from opentinker.shared.durable_files import file_system
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.audit_log import files_of, folder, writers
from opentinker.shared.security.authorization import MAY, Action, Role
from opentinker.shared.security.key_text import parse, read_key
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.store import Store
from tests.conftest import until
from tests.support.api import OPERATOR, Http, bearing, id_of, new_key_of
from tests.support.browsing import browser
from tests.support.http_server import http_server
from tests.support.scheduling import Workers, new_job, scheduler

YEAR_S = 365 * 86400.0


@pytest.fixture
async def http(url: str) -> AsyncIterator[Http]:
    """Who asks is said with every request."""
    async with aiohttp.ClientSession() as session:
        yield Http(session, url)


async def made(http: Http, by: str, **asked: Any) -> tuple[int, Any]:
    return await http("POST", "/v1/keys", data=orjson.dumps({"role": "viewer", **asked}), headers=bearing(by))


# --- HTTP -----------------------------------------------------------------------------------------------------------


async def test_a_key_is_shown_by_the_answer_that_makes_it_and_by_no_other(http: Http) -> None:
    async with http.session.post(
        f"{http.url}/v1/keys",
        data=orjson.dumps({"role": "member", "tenant": "red", "name": "laptop", "expires_in_s": YEAR_S}),
        headers=bearing(),
    ) as response:
        assert response.status == 201 and response.headers["Cache-Control"] == "no-store"
        key = await response.json()
    assert key["tenant"] == "red" and key["role"] == "member" and key["state"] == "live" and key["name"] == "laptop"
    assert key["scopes"] == sorted(MAY[Role.MEMBER]) and key["created_by"] == id_of(OPERATOR)
    assert abs(key["expires"] - time.time() - YEAR_S) < 600.0 and key["last_used"] is None
    assert (await http("GET", "/v1/jobs", headers=bearing(key["key"])))[0] == 200
    _, listed = await http("GET", "/v1/keys?tenant=red", headers=bearing())
    assert [entry["id"] for entry in listed["keys"]] == [key["id"]] and listed["keys"][0]["last_used"] is not None
    assert key["key"].rpartition("_")[2] not in str(listed) and "digest" not in str(listed)
    _, found = await http("GET", "/v1/tenants", headers=bearing())
    assert {tenant["name"] for tenant in found["tenants"]} == {"default", "red"}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"role": "king"}, "role"),
        ({"tenant": "Red_"}, "tenant"),
        ({"tenant": "r" * 33}, "tenant"),
        ({"tenant": "a.b"}, "tenant"),
        ({"name": "x" * 101}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"scopes": ["fly"]}, "scopes.0"),
        ({"scopes": ["about"]}, "scopes"),
        ({"scopes": ["jobs:write"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"expires_in_s": 1e12}, "expires_in_s"),
        ({"secret": "mine"}, "secret"),
        ({"role": "operator", "tenant": "red"}, "role"),
    ],
)
async def test_what_no_key_can_be_is_refused_by_field(http: Http, asked: dict[str, Any], field: str) -> None:
    status, body = await made(http, OPERATOR, **asked)
    assert status == 422 and [mistake["field"] for mistake in body["errors"]] == [field]


async def test_a_scope_beyond_the_role_is_refused_with_those_that_it_can_have(http: Http) -> None:
    _, body = await made(http, OPERATOR, scopes=["jobs:write"])
    can = "checkpoints:read, environments:read, jobs:read"
    assert body["errors"][0]["problem"] == f"a viewer key cannot have the scope jobs:write; it can have: {can}"
    _, body = await made(http, OPERATOR, role="admin", scopes=["server:write", "server:read"])
    assert body["errors"][0]["problem"].startswith("an admin key cannot have the scopes server:read, server:write; it ")


async def test_nobody_makes_rotates_or_revokes_more_than_they_have(http: Http, store: Store) -> None:
    admin = await new_key_of(store)
    narrow = await new_key_of(store, "default", Role.ADMIN, {Action.KEYS_WRITE, Action.JOBS_READ})
    assert (await made(http, admin, role="admin"))[0] == 201
    status, body = await made(http, admin, role="operator")
    assert status == 403 and body["detail"] == (
        "an operator key with these scopes has rights that your admin key lacks"
    )
    assert (await made(http, narrow, scopes=["jobs:read"]))[0] == 201
    assert (await made(http, narrow))[0] == 403
    for verb in ("rotate", "revoke"):
        assert (await http("POST", f"/v1/keys/{id_of(OPERATOR)}/{verb}", headers=bearing(admin)))[0] == 403
        assert (await http("POST", f"/v1/keys/{id_of(admin)}/{verb}", headers=bearing(narrow)))[0] == 403
    assert (await http("GET", "/v1/workers", headers=bearing()))[0] == 200


async def test_an_admin_sees_no_tenant_but_its_own_and_an_operator_all(http: Http, store: Store) -> None:
    red, blue = await new_key_of(store, "red"), await new_key_of(store, "blue")
    answers = [await http("GET", f"/v1/keys?tenant={name}", headers=bearing(red)) for name in ("blue", "gone")]
    assert [status for status, _ in answers] == [404, 404]
    assert answers[0][1]["detail"].replace("blue", "X") == answers[1][1]["detail"].replace("gone", "X")
    assert (await http("GET", "/v1/keys?tenant=red", headers=bearing(red)))[1]["keys"][0]["id"] == id_of(red)
    assert (await made(http, red, tenant="blue"))[0] == (await made(http, red, tenant="gone"))[0] == 404
    assert (await http("GET", "/v1/keys?tenant=gone", headers=bearing()))[0] == 404
    status, gone = await http("POST", f"/v1/keys/{id_of(blue)}/revoke", headers=bearing())
    assert (status, gone["state"], gone["tenant"]) == (200, "revoked", "blue")


async def test_an_operator_frees_a_worker_of_a_foreign_job(http: Http, url: str, ctx: Context, store: Store) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0", "env-0")
    red = await new_key_of(store, "red")
    job = await new_job(store, "j-red0000000", tenant="red")
    free = "/v1/workers/rollout-0/free"
    try:
        await until(lambda: workers.holds("rollout-0"), lambda found: found == job)
        assert (await http("POST", free, headers=bearing(red)))[0] == 403
        assert (await http("GET", f"/v1/jobs/{job}", headers=bearing()))[0] == 404
        async with AsyncClient(url, api_key=OPERATOR) as operator:
            assert await operator.free_worker("rollout-0") == {"worker": "rollout-0", "job": job, "state": "cancelled"}
        status, seen = await http("GET", f"/v1/jobs/{job}", headers=bearing(red))
        assert (status, seen["state"]) == (200, "cancelled") and "by an operator" in seen["reason"]
        await until(lambda: workers.holds("rollout-0"), lambda found: found is None)
        assert (await http("POST", free, headers=bearing()))[0] == 409
        assert (await http("POST", "/v1/workers/rollout-9/free", headers=bearing()))[0] == 404
        (present,) = writers(folder(ctx.settings.data_dir))
        lines = [orjson.loads(line) for file in files_of(present) for line in file.read_bytes().splitlines()]
        freed = [line for line in lines if line.get("path") == free and line["result"] == 200]
        assert [(line["job"], line["role"]) for line in freed] == [(job, "operator")]
    finally:
        await workers.stop()


async def test_rotating_gives_a_new_secret_and_leaves_what_the_key_may(http: Http, store: Store) -> None:
    key = await new_key_of(store, "red", Role.ADMIN)
    path = f"/v1/keys/{id_of(key)}/rotate"
    status, new = await http("POST", path, headers=bearing(key))
    assert status == 200 and id_of(new["key"]) == id_of(key) and new["previous_valid_until"] > time.time() + 3600
    for valid in (key, new["key"]):
        assert (await http("GET", "/v1/keys", headers=bearing(valid)))[0] == 200
    status, third = await http("POST", path, data=b'{"grace_s": 0}', headers=bearing(new["key"]))
    assert status == 200 and third["previous_valid_until"] is None
    assert (await http("GET", "/v1/keys", headers=bearing(third["key"])))[0] == 200
    await http("POST", f"/v1/keys/{id_of(key)}/revoke", headers=bearing(third["key"]))
    assert (await http("POST", path, headers=bearing()))[0] == 409


# --- Python ---------------------------------------------------------------------------------------------------------


async def test_the_client_makes_lists_rotates_and_revokes(url: str) -> None:
    async with AsyncClient(url) as client:
        key = await client.create_key("viewer", tenant="red", name="x", scopes=["jobs:read"], expires_in_s=60)
        assert key["scopes"] == ["jobs:read"] and [k["id"] for k in await client.keys("red")] == [key["id"]]
        new = await client.rotate_key(key["id"], grace_s=5)
        assert new["id"] == key["id"] and new["key"] != key["key"]
        assert (await client.revoke_key(key["id"]))["state"] == "revoked"
        assert {tenant["name"] for tenant in await client.tenants()} == {"default", "red"}


async def test_what_makes_a_secret_is_asked_once() -> None:
    """Were it asked again after an answer that was lost, there would be a key that nobody has."""
    asked: list[str] = []

    async def breaks(request: web.Request) -> web.Response:
        asked.append(request.path)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with http_server(web.post("/{any:.*}", breaks)) as url, AsyncClient(url, wait_s=5.0) as client:
        for once in (client.create_key("viewer"), client.rotate_key("0123456789")):
            with pytest.raises(ApiError, match="may have been done or not"):
                await once
    assert asked == ["/v1/keys", "/v1/keys/0123456789/rotate"]


async def test_a_key_says_whose_it_is_and_what_it_may(http: Http, store: Store) -> None:
    key = await new_key_of(store, "red", Role.MEMBER, [Action.JOBS_READ], expires=time.time() + YEAR_S)
    status, found = await http("GET", "/v1/whoami", headers=bearing(key))
    assert status == 200 and abs(found.pop("expires") - time.time() - YEAR_S) < 600.0
    assert found == {
        "files": file_system(),
        "jobs": [],
        "auth": "on",
        "tenant": "red",
        "role": "member",
        "scopes": ["jobs:read"],
        "key": id_of(key),
        "user": None,
        "name": "",
    }
    assert (await http("GET", "/v1/whoami"))[0] == 401
    async with AsyncClient(http.url, api_key=OPERATOR) as client:
        found = await client.whoami()
    assert (found["key"], found["role"], found["expires"]) == (id_of(OPERATOR), "operator", None)


# --- command line ---------------------------------------------------------------------------------------------------


async def typed(*arguments: object, status: int = 0) -> tuple[str, str]:
    done = await asyncio.to_thread(CliRunner().invoke, app, [str(argument) for argument in arguments])
    assert done.exit_code == status, f"{arguments}: {done.output}{done.exception!r}"
    lines = done.stdout.splitlines(keepends=True)  # what the scheduler of the test logs meanwhile is not the command's
    shown = "".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\d \d\d:", line))
    return shown, re.sub(r"(?m)^waiting for http.*\n", "", done.stderr)  # said on a busy machine


async def test_keys_on_the_command_line(url: str, store: Store, tmp_path: Path) -> None:
    on = ("--url", url)
    shown, said = await typed("keys", "create", "--role", "admin", "--tenant", "red", "--expires", "90d", *on)
    key = shown.strip()
    assert parse(key) and f"admin of tenant red, id {id_of(key)}" in said and key not in said
    file = tmp_path / "key"
    shown, said = await typed("keys", "create", "--scopes", "jobs:read, jobs:write", "--out", file, *on)
    assert shown.strip() == str(file) and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_key(file) not in said
    held = read_key(file)
    await typed("keys", "create", "--out", file, *on, status=1)
    assert read_key(file) == held
    whole = orjson.loads((await typed("keys", "create", "--json", *on))[0])
    assert parse(whole["key"]) and whole["role"] == "member"
    listed, _ = await typed("keys", "list", *on)
    assert id_of(held) in listed and id_of(key) not in listed and held.rpartition("_")[2] not in listed
    assert orjson.loads((await typed("keys", "list", "--tenant", "red", "--json", *on))[0])[0]["id"] == id_of(key)
    new = (await typed("keys", "rotate", id_of(key), "--grace", "1h", *on))[0].strip()
    assert id_of(new) == id_of(key) and new != key
    assert (await typed("keys", "revoke", id_of(key), *on))[0] == f"{id_of(key)}  revoked\n"
    found = await KeyStore(store.redis).find(id_of(key))
    assert found is not None and found.revoked
    async with browser(url, held):
        (session,) = orjson.loads((await typed("keys", "sessions", "--json", *on))[0])
        assert session["key"] == id_of(held)
        assert f"key {id_of(held)}" in (await typed("keys", "sessions", *on))[0]
        assert (await typed("keys", "sign-out", session["id"], *on))[0] == f"{session['id']}  ended\n"
        assert (await typed("keys", "sessions", *on))[0] == "no sessions\n"
        await typed("keys", "sign-out", session["id"], *on, status=1)
    for wrong in (("--expires", "soon"), ("--scopes", "fly"), ("--role", "king")):
        await typed("keys", "create", *wrong, *on, status=2 if wrong[0] == "--expires" else 1)


async def test_whoami_on_the_command_line(url: str, ctx: Context) -> None:
    shown, said = await typed("whoami", "--url", url)
    assert shown.startswith(f"key {id_of(OPERATOR)}, 'admin_key_file', operator of tenant default, expires: never\n")
    assert "keys:write" in shown and said == ""
    assert orjson.loads((await typed("whoami", "--json", "--url", url))[0])["role"] == "operator"


async def test_a_server_without_keys_is_called_so_loudly(ctx: Context) -> None:
    ctx.settings = ctx.settings.model_copy(update={"auth": False})
    async with scheduler(ctx) as open_url:
        shown, said = await typed("whoami", "--url", open_url)
        assert shown == f"{open_url} requires no key: everyone is an operator of tenant default\n"
        assert said == f"AUTH IS OFF at {open_url}: anyone who reaches it is an operator\n"
        shown, said = await typed("jobs", "--json", "--url", open_url)
        assert orjson.loads(shown) == [] and said.startswith("AUTH IS OFF at")


async def test_key_file_rotation(ctx: Context, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENTINKER_API_KEY", "OPENTINKER_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name)
    home = tmp_path / "data"
    with locked(home):
        file = operator_key(Plan(data_dir=home))
        assert file is not None
        ctx.settings = ctx.settings.model_copy(update={"admin_key_file": file})
        async with scheduler(ctx) as url:
            (home / "run" / "state.json").write_bytes(orjson.dumps({"url": url, "admin_key_file": str(file)}))
            before = read_key(file)
            _, said = await typed("keys", "rotate", id_of(before), "--grace", "0s")
            assert read_key(file) != before and f"written to {file}" in said
            assert "admin_key_file" in (await typed("keys", "list"))[0]
        async with scheduler(ctx) as url:  # whose file it is registers it again
            (home / "run" / "state.json").write_bytes(orjson.dumps({"url": url, "admin_key_file": str(file)}))
            assert id_of(before) in (await typed("keys", "list"))[0]


async def test_a_first_key_is_written_without_a_server(tmp_path: Path) -> None:
    file = tmp_path / "operator-key"
    assert (await typed("keys", "init", file, "--env", "prod"))[0] == f"{file}\n"
    assert read_key(file).startswith("ot_prod_") and stat.S_IMODE(file.stat().st_mode) == 0o600
    await typed("keys", "init", file, status=1)
    await typed("keys", "init", tmp_path / "nowhere" / "key", status=1)
    await typed("keys", "init", tmp_path / "other", "--env", "No!", status=2)
