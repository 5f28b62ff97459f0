"""No secret of a key in a log, an error or an event: a scheduler is told one in every place, right and wrong."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import orjson

from opentinker.client import AsyncClient
from opentinker.shared.security.key_text import new_key
from opentinker.shared.state.store import Store
from tests.conftest import WAIT_S, Server, free_port, wait_port
from tests.support.api import OPERATOR, SPEC, Http, bearing
from tests.support.scheduling import scheduler_process


async def test_no_secret_is_logged(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "scheduler.log"
    process = scheduler_process(nats_server, valkey_server, port, tmp_path, log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_port(port, process)
        async with AsyncClient(url, wait_s=WAIT_S) as client:
            made = await client.create_key("admin", tenant="red", name="canary")
            secrets = [made["key"], (await client.rotate_key(made["id"]))["key"], new_key("local"), OPERATOR]
            canaries = [key.rpartition("_")[2] for key in secrets]
            heard = [orjson.dumps(await client.keys("red"))]
        async with aiohttp.ClientSession() as session:
            http = Http(session, url)
            for key in secrets:
                heard += [await answered(http, method, path, **how) for method, path, how in everywhere(key)]
            _, job = await http("POST", "/v1/jobs", data=orjson.dumps(SPEC), headers=bearing(secrets[1]))
            for part in ("events?format=json", "logs?format=json", ""):
                heard.append(
                    await answered(http, "GET", f"/v1/jobs/{job['id']}/{part}".rstrip("/"), headers=bearing(secrets[1]))
                )
            heard.append(await answered(http, "GET", "/metrics", headers=bearing()))
            async with AsyncClient(url) as client:
                await client.revoke_key(made["id"])
            heard.append(await answered(http, "GET", "/v1/jobs", headers=bearing(made["key"])))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    written = log.read_bytes()
    assert b"operator_key" in written and made["id"].encode() in b"".join(heard)
    for canary in canaries:
        assert canary.encode() not in written
        assert [text for text in heard if canary.encode() in text] == []
    stored = [str(await store.redis.hgetall(name)) for name in await store.redis.keys("key:*")]
    assert len(stored) == 2 and not any(canary in text for text in stored for canary in canaries)


def everywhere(key: str) -> list[tuple[str, str, dict[str, object]]]:
    """Requests that bear it as they should, and as they should not."""
    own = bearing(key)
    return [
        ("GET", "/v1/jobs", {"headers": own}),
        ("GET", "/v1/jobs", {"headers": {"Authorization": key}}),
        ("GET", "/v1/jobs", {"headers": {"Authorization": f"Basic {key}"}}),
        ("GET", "/v1/jobs", {"headers": bearing(key[:-1])}),
        ("GET", f"/v1/jobs?key={key}", {"headers": own}),
        ("GET", f"/v1/jobs?before={key}", {"headers": own}),
        ("GET", f"/v1/jobs/{key}", {"headers": own}),
        ("GET", f"/{key}", {"headers": own}),
        ("POST", f"/v1/keys/{key}/revoke", {"headers": own}),
        ("GET", f"/v1/keys?tenant={key}", {"headers": own}),
        ("GET", f"/v1/served/{key}", {"headers": own}),
        ("DELETE", f"/v1/environments/{key}", {"headers": own}),
        ("POST", "/v1/jobs", {"headers": own, "data": key}),
        ("POST", "/v1/jobs", {"headers": own, "data": orjson.dumps({**SPEC, "name": key})}),
        ("POST", "/v1/jobs", {"headers": own, "data": orjson.dumps({**SPEC, key: 1})}),
        ("POST", "/v1/jobs", {"headers": {**own, "Idempotency-Key": f"{key} "}, "data": orjson.dumps(SPEC)}),
        ("POST", "/v1/keys", {"headers": own, "data": orjson.dumps({"role": key, "tenant": key})}),
        ("GET", f"/v1/jobs/j-0123456789/v1/{key}", {"headers": own}),
        ("POST", "/v1/jobs/j-0123456789/v1/completions", {"headers": own, "data": orjson.dumps({"model": key})}),
    ]


async def answered(http: Http, method: str, path: str, **request: object) -> bytes:
    async with http.session.request(method, http.url + path, **request) as response:  # type: ignore[arg-type]
        return repr(response.headers).encode() + await response.read()
