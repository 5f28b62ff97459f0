"""Findings of `opentinker doctor` on servers and on files with secrets."""

from __future__ import annotations

from pathlib import Path

import orjson

from opentinker.cli.machine import doctor_servers
from opentinker.cli.machine.doctor_servers import Place, look, secrets
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import STREAMS
from tests.conftest import Server, free_port


async def test_servers_report_version_and_clock(bus: Bus, nats_server: Server, valkey_server: Server) -> None:
    found = {check["what"]: check for check in await look(Place(nats_server.url, valkey_server.url))}
    assert nats_server.url in found["NATS"]["found"] and valkey_server.url.split("/")[2] in found["Redis"]["found"]
    assert found["JetStream"]["found"] == f"{len(STREAMS)} streams on disk"
    assert found["persistence"]["found"].startswith("appendonly yes, appendfsync ")
    assert {found[what]["result"] for what in ("NATS", "JetStream", "Redis", "clock")} == {"ok"}


async def test_servers_that_are_not_there_are_bad_and_no_password_is_shown() -> None:
    port = free_port()
    place = Place(f"nats://me:hush@127.0.0.1:{port}", f"redis://me:hush@127.0.0.1:{port}/0")
    found = await look(place)
    assert [(check["what"], check["result"]) for check in found] == [("NATS", "bad"), ("Redis", "bad")]
    assert "hush" not in orjson.dumps(found).decode() and all(check["hint"] for check in found)


def test_what_redis_may_lose_is_said() -> None:
    def result(aof: int, **chosen: str) -> list[str]:
        values = {"appendfsync": "always", "maxmemory-policy": "noeviction"} | {
            name.replace("_", "-"): value for name, value in chosen.items()
        }
        return [check["result"] for check in doctor_servers._kept({"aof_enabled": aof}, values)]

    assert result(1) == ["ok"] and result(0) == ["bad"]
    assert result(1, appendfsync="everysec") == ["note"] and result(1, maxmemory_policy="allkeys-lru") == ["bad"]
    assert [doctor_servers._clock(skew)["result"] for skew in (0.2, -3.0)] == ["ok", "bad"]


def test_secrets_that_others_may_read_are_named(tmp_path: Path) -> None:
    access = tmp_path / "run" / "access"
    access.mkdir(parents=True)
    (access / "nats-trainer").write_text("secret")
    (access / "nats-trainer").chmod(0o600)
    assert [check["result"] for check in secrets(tmp_path)] == ["ok"]
    (access / "nats-trainer").chmod(0o644)
    (check,) = secrets(tmp_path)
    assert check["result"] == "bad" and str(access / "nats-trainer") in check["hint"]
