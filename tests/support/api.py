"""The API as tests speak with it: requests over HTTP, event streams, and checkpoints as a trainer leaves them."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from opentinker.client import ApiError, AsyncClient
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action, Role
from opentinker.shared.security.key_text import new_key, parse, write_key
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.store import Store
from opentinker.shared.types.manifest import Manifest
from tests.support.factories import make_spec

OPERATOR = new_key("local")
"""The operator's key of every scheduler that a test starts, unless it says otherwise."""
OPERATOR_FILE = Path(tempfile.mkdtemp(prefix="opentinker-test-")) / "operator-key"
write_key(OPERATOR_FILE, OPERATOR)
atexit.register(shutil.rmtree, OPERATOR_FILE.parent, ignore_errors=True)

SPEC = make_spec(model__base="some/model").model_dump(mode="json")


OPEN = (api_types.Event, api_types.Events, api_types.Failure, api_types.Failures)
"""What else belongs to these has no end."""


def fits(answer: Any, kind: Any) -> None:
    """What the type names is there as it says, and there is nothing that it does not name."""
    found = msgspec.convert(answer, kind)
    assert found == answer or kind in OPEN


def bearing(key: str = OPERATOR) -> dict[str, str]:
    """Headers of a request with this key."""
    return {"Authorization": f"Bearer {key}"}


def id_of(key: str) -> str:
    return (parse(key) or ("", ""))[1]


async def new_key_of(
    store: Store,
    tenant: str = "default",
    role: Role = Role.ADMIN,
    scopes: Iterable[Action] | None = None,
    *,
    expires: float = 0.0,
) -> str:
    """A key that the server knows."""
    key = new_key("local")
    chosen = None if scopes is None else sorted(scopes)
    await KeyStore(store.redis).create(
        key, now=time.time(), tenant=tenant, role=role, scopes=chosen, name="", by="test", expires=expires
    )
    return key


class Http:
    """One session against one server; answers are (status, body)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def __call__(self, method: str, path: str, **request: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **request) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if "json" in response.content_type else raw

    async def submit(self, spec: dict[str, Any] = SPEC, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self("POST", "/v1/jobs", data=orjson.dumps(spec), headers=headers)

    async def job(self, spec: dict[str, Any] = SPEC) -> str:
        status, job = await self.submit(spec)
        assert status == 201, job
        return str(job["id"])


def mistakes(body: Any) -> dict[str, str]:
    assert {"type", "title", "status", "detail", "hint"} <= body.keys()
    return {mistake["field"]: mistake["problem"] for mistake in body["errors"]}


async def read_events(response: aiohttp.ClientResponse, count: int | None = None) -> list[dict[str, Any]]:
    """Server-sent events up to `count`, or to the end of the stream."""
    found: list[dict[str, Any]] = []
    fields: dict[str, str] = {}
    async for raw in response.content:
        name, _, value = raw.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            event = orjson.loads(fields["data"])
            assert (fields["id"], fields["event"]) == (event["id"], event["event"])
            found.append(event)
            fields = {}
            if len(found) == count:
                break
    return found


def write_checkpoint(
    ctx: Context, job: str, step: int, files: dict[str, bytes], epoch: int = 1, *, created: float = 1e9
) -> Path:
    directory = ctx.settings.data_dir / "jobs" / job / "checkpoints" / f"step-{step:06d}"
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    entries = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
    manifest = {
        "job": job,
        "epoch": epoch,
        "step": step,
        "version": [epoch, step],
        "created": created,
        "files": entries,
    }
    text = msgspec.json.encode(msgspec.convert(manifest, Manifest))
    (directory / "manifest.json").write_bytes(msgspec.json.format(text))
    return directory


async def refused(client: AsyncClient, spec: Any, **options: Any) -> dict[str, str]:
    """By field, why the server does not take the job."""
    with pytest.raises(ApiError) as wrong:
        await client.submit(spec, **options)
    assert wrong.value.status == 422
    found: dict[str, str] = {}
    for mistake in wrong.value.mistakes:
        found[mistake["field"]] = "; ".join(filter(None, [found.get(mistake["field"]), mistake["problem"]]))
    return found
