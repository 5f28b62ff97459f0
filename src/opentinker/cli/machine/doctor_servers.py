"""Checks of `opentinker doctor` on the servers: those of `opentinker up` here, otherwise those that settings name.

Each is asked with the credentials of real use: reachable, its version, durability, and clock difference.
"""

from __future__ import annotations

import asyncio
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
import redis.asyncio as aioredis
from nats.js.api import StorageType
from nats.js.errors import Error as JetStreamError
from redis.exceptions import NoPermissionError, RedisError

from opentinker.local.discovery import KEY_FILE, is_running, read_state
from opentinker.shared.messaging.permissions import OPERATOR
from opentinker.shared.messaging.subjects import STREAMS
from opentinker.shared.security.redact import redacted
from opentinker.shared.settings_sources import load_settings

PATIENCE_S = 5.0
SKEW_S = 1.0
"""Clocks further apart than this make waiting times and expiry of keys wrong."""
ALWAYS = "always"
NAMES = [str(stream.name) for stream in STREAMS]
Check = dict[str, str]


@dataclass(frozen=True)
class Place:
    """Addresses and credentials of the servers. Without passwords the URLs contain the user."""

    nats_url: str
    redis_url: str
    nats_password: str = ""
    redis_password: str = ""


def check(what: str, found: str, result: str = "ok", hint: str = "") -> Check:
    return {"what": what, "found": found, "result": result, "hint": hint}


def place_of(data_dir: Path) -> Place | None:
    """Return the addresses of the servers; None if nothing runs on `data_dir` and no settings name servers."""
    if is_running(data_dir):
        state, access = read_state(data_dir), data_dir / "run" / "access"
        passwords = [_text(access / f"{server}-{OPERATOR}") for server in ("nats", "valkey")]
        return Place(str(state.get("nats_url", "")), str(state.get("redis_url", "")), *passwords)
    settings = load_settings()
    if not {"nats_url", "redis_url"} & settings.model_fields_set:
        return None
    passwords = [settings.password("nats_password_file"), settings.password("redis_password_file")]
    return Place(settings.nats_url, settings.redis_url, *passwords)


def servers(data_dir: Path) -> list[Check]:
    place = place_of(data_dir)
    if place is None:
        return [check("servers", "none run here, and no setting names any", "note", "start them: opentinker up")]
    return asyncio.run(look(place)) + secrets(data_dir)


async def look(place: Place) -> list[Check]:
    return [*await _nats(place), *await _redis(place)]


async def _nats(place: Place) -> list[Check]:
    what, shown = "NATS", redacted(place.nats_url)
    login = {"user": OPERATOR, "password": place.nats_password} if place.nats_password else {}
    try:
        async with asyncio.timeout(PATIENCE_S):
            client = await nats.connect(place.nats_url, allow_reconnect=False, connect_timeout=3, **login)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        why = str(error) or type(error).__name__
        return [check(what, f"{shown}: {why}", "bad", "start it, or set nats_url and nats_password_file")]
    try:
        found = [check(what, f"{client.connected_server_version} at {shown}")]
        missing, forgetful = [], []
        for name in NAMES:
            try:
                config = (await client.jetstream(timeout=PATIENCE_S).stream_info(name)).config
            except JetStreamError:
                missing.append(name)
                continue
            if config.storage == StorageType.MEMORY:
                forgetful.append(name)
    except (TimeoutError, nats.errors.Error) as error:
        hint = "ask as an operator, and see that nats-server has a `jetstream` block as in deploy/nats.conf"
        return [*found, check("JetStream", str(error) or type(error).__name__, "bad", hint)]
    finally:
        await client.close()
    if forgetful:
        hint = "remove them while no job runs: the scheduler creates them again, on disk"
        return [*found, check("JetStream", f"kept in memory alone: {', '.join(forgetful)}", "bad", hint)]
    if missing:
        return [*found, check("JetStream", f"no {', '.join(missing)}", "note", "the scheduler makes them as it starts")]
    return [*found, check("JetStream", f"{len(NAMES)} streams on disk")]


async def _redis(place: Place) -> list[Check]:
    what, shown = "Redis", redacted(place.redis_url)
    login: dict[str, Any] = {"username": OPERATOR, "password": place.redis_password} if place.redis_password else {}
    client = aioredis.from_url(place.redis_url, decode_responses=True, socket_timeout=PATIENCE_S, **login)
    try:
        before = time.time()
        seconds, micros = await client.time()
        skew = seconds + micros / 1e6 - (before + time.time()) / 2
        info = await client.info()
        chosen: Any = await client.config_get("appendfsync", "maxmemory-policy")
    except NoPermissionError:
        found = f"{shown} answers; this user may not ask how it keeps what it is told"
        return [check(what, found, "note", "on its machine, `opentinker doctor` asks as an operator")]
    except (RedisError, OSError, TimeoutError) as error:
        hint = "start it, or set redis_url and redis_password_file"
        return [check(what, f"{shown}: {str(error) or type(error).__name__}", "bad", hint)]
    finally:
        await client.aclose()
    version = info.get("valkey_version") or info.get("redis_version")
    return [check(what, f"{version} at {shown}"), *_kept(info, chosen), _clock(skew)]


def _kept(info: dict[str, Any], chosen: dict[str, Any]) -> list[Check]:
    """Check that the server keeps everything that it has acknowledged."""
    aof, sync, evicts = info.get("aof_enabled"), chosen.get("appendfsync"), chosen.get("maxmemory-policy")
    what, found = "persistence", f"appendonly {'yes' if aof else 'no'}, appendfsync {sync}"
    if not aof:
        return [check(what, found, "bad", "every job is lost with the process: appendonly yes (deploy/valkey.conf)")]
    if evicts not in (None, "noeviction"):
        return [check(what, f"{found}, maxmemory-policy {evicts}", "bad", "it may forget jobs: noeviction")]
    if info.get("aof_last_write_status") == "err":
        return [check(what, f"{found}; the last write failed", "bad", "free room on its disk")]
    if sync != ALWAYS:
        return [check(what, found, "note", "a power cut loses the last second: appendfsync always")]
    return [check(what, found)]


def _clock(skew: float) -> Check:
    far = abs(skew) > SKEW_S
    hint = "let both machines follow NTP: leases and keys end by the clock" if far else ""
    return check("clock", f"Redis is {skew:+.2f} s from this machine", "bad" if far else "ok", hint)


def secrets(data_dir: Path) -> list[Check]:
    """Files with keys and passwords that others may read."""
    state = read_state(data_dir)
    files = [Path(str(state[KEY_FILE]))] if state.get(KEY_FILE) else []
    files += sorted(path for path in (data_dir / "run" / "access").glob("*") if path.is_file())
    open_ = [path for path in files if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    if open_:
        hint = f"chmod 600 {' '.join(str(path) for path in open_[:5])}"
        return [check("secrets", f"{len(open_)} files that others may read", "bad", hint)]
    return [check("secrets", f"{len(files)} files, ours alone")] if files else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
