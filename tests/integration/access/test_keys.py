"""Keys of an API: the access that they give, and its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import aiohttp
import msgspec
import orjson
import pytest
from redis.exceptions import RedisError

from opentinker.services.scheduler.http.auth import CACHE_S, MAX_UNKNOWN_LOOKUPS, RECHECK_S
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import MAY, SCOPES, Action, Principal, Role, Verdict, authorize, outranks
from opentinker.shared.security.key_text import digest_of, new_key, parse
from opentinker.shared.security.redact import redacted
from opentinker.shared.state.keys import Key, KeyStore
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import Conflict, NotFound
from tests.conftest import soon, until
from tests.support.api import OPERATOR, SPEC, Http, bearing, new_key_of, read_events
from tests.support.scheduling import scheduler

# --- what a key looks like ------------------------------------------------------------------------------------------


def test_a_key_says_its_deployment_and_its_id_and_shows_a_slip_of_the_pen() -> None:
    key = new_key("prod")
    env, id = parse(key) or ("", "")
    assert env == "prod" and key.startswith(f"ot_prod_{id}_") and len({new_key("prod") for _ in range(100)}) == 100
    wrong = [key[:-1], key + "a", key.swapcase(), key.replace("prod", "test"), "", "ot_prod", key[::-1], f" {key}"]
    wrong += [key[:n] + ("a" if key[n] != "a" else "b") + key[n + 1 :] for n in range(8, len(key)) if key[n] != "_"]
    assert [text for text in wrong if parse(text)] == []


def test_a_key_in_a_text_loses_its_secret() -> None:
    for env in ("local", "prod2"):
        key = new_key(env)
        public = key.removesuffix(key.rpartition("_")[2])
        assert redacted(f"see {key}, and {key[:-9]}.") == f"see {public}***, and {public}***."


# --- who may what ---------------------------------------------------------------------------------------------------


def test_each_role_may_what_the_one_before_may_and_more() -> None:
    roles = [MAY[role] for role in (Role.VIEWER, Role.MEMBER, Role.ADMIN, Role.OPERATOR)]
    assert all(less < more for less, more in itertools.pairwise(roles))
    assert roles[-1] == SCOPES and set(MAY) == set(Role)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action)
def test_an_action_needs_role_scope_and_tenant(role: Role, action: Action) -> None:
    free, about = action is Action.FREE, action is Action.ABOUT
    for scopes in (SCOPES, frozenset[Action](), frozenset({action})):
        who = Principal("red", role, "k", scopes)
        may = free or about or (action in scopes and action in MAY[role])
        assert (
            authorize(who, action) is authorize(who, action, "red") is (Verdict.ALLOWED if may else Verdict.FORBIDDEN)
        )
        everywhere = free or (role is Role.OPERATOR and action in (Action.KEYS_READ, Action.KEYS_WRITE))
        foreign = Verdict.FORBIDDEN if not may else Verdict.ALLOWED if everywhere else Verdict.UNKNOWN
        assert authorize(who, action, "blue") is foreign
    assert authorize(None, action) is (Verdict.ALLOWED if free else Verdict.FORBIDDEN)


def test_nobody_gives_more_than_they_have() -> None:
    admin = Principal("red", Role.ADMIN, "k", SCOPES)
    narrow = Principal("red", Role.ADMIN, "k", frozenset({Action.KEYS_WRITE, Action.JOBS_READ}))
    assert outranks(admin, Role.ADMIN, SCOPES) and not outranks(admin, Role.OPERATOR, SCOPES)
    assert not outranks(narrow, Role.VIEWER, SCOPES) and outranks(narrow, Role.VIEWER, {Action.JOBS_READ})


# --- what Redis knows -----------------------------------------------------------------------------------------------


async def test_a_rotated_key_stays_valid_for_its_time_of_grace(store: Store) -> None:
    key, keys, now = await new_key_of(store), KeyStore(store.redis), time.time()
    _, id = parse(key) or ("", "")
    second, third = new_key("local", id), new_key("local", id)
    for _ in range(2):  # a client that lost the connection says it again
        await keys.rotate(id, second, now=now, grace_s=60.0)
    found = await keys.find(id)
    assert found is not None
    assert [found.fits(digest_of(text), now + s) for text, s in ((key, 59), (key, 61), (second, 1e9))] == [
        *(True, False, True)
    ]
    await keys.rotate(id, third, now=now, grace_s=60.0)
    found = await keys.find(id)
    assert found is not None
    assert [found.fits(digest_of(text), now) for text in (key, second, third)] == [False, True, True]


async def test_what_is_over_is_not_rotated_and_revoking_twice_is_fine(store: Store) -> None:
    keys, now = KeyStore(store.redis), time.time()
    _, id = parse(await new_key_of(store)) or ("", "")
    _, old = parse(await new_key_of(store, expires=now - 1.0)) or ("", "")
    for _ in range(2):
        await keys.revoke(id, now=now)
    for name, problem in ((id, "revoked"), (old, "expired")):
        with pytest.raises(Conflict, match=problem):
            await keys.rotate(name, new_key("local", name), now=now, grace_s=1.0)
    for missing in (keys.revoke("x" * 10, now=now), keys.rotate("x" * 10, "", now=now, grace_s=1.0)):
        with pytest.raises(NotFound):
            await missing
    assert {key.id: key.state(now) for key in await keys.of("default")} == {id: "revoked", old: "expired"}
    assert await store.redis.ttl(f"key:{id}") > 0 and await store.redis.ttl(f"key:{old}") > 0


async def test_a_tenant_has_a_limit_of_keys(store: Store) -> None:
    keys = KeyStore(store.redis, max_keys=2)

    async def made(tenant: str) -> Key:
        return await keys.create(
            new_key("local"), now=time.time(), tenant=tenant, role=Role.ADMIN, scopes=None, name="", by="test"
        )

    first, _ = await made("red"), await made("red")
    with pytest.raises(Conflict, match="2 keys"):
        await made("red")
    await store.redis.delete(f"key:{first.id}")  # as after KEPT_S
    await made("red")
    await made("blue")
    assert set(await keys.tenants()) == {"red", "blue"}


# --- what they open -------------------------------------------------------------------------------------------------


BAD = [
    (None, "API key required"),
    (OPERATOR, "API key required"),
    (f"Basic {OPERATOR}", "API key required"),
    ("Bearer", "API key required"),
    (f"Bearer {OPERATOR[:-1]}", "malformed API key"),
    ("Bearer \xff\udcff", "malformed API key"),
    (f"Bearer {new_key('elsewhere')}", "belongs to deployment 'elsewhere', and this server is 'local'"),
    (f"Bearer {new_key('local')}", "unknown API key"),
    (f"Bearer {new_key('local', (parse(OPERATOR) or ('', ''))[1])}", "unknown API key"),
]


@pytest.mark.parametrize(("header", "why"), BAD, ids=range(len(BAD)))
async def test_a_wrong_key_opens_nothing_and_is_told_why(api: Http, header: str | None, why: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode("utf-8", "surrogateescape").decode("latin-1")}
    for path in ("/v1/jobs", "/nowhere", "/metrics", "/openapi.json", "/healthz/../v1/jobs", "//healthz"):
        status, body = await api("GET", path, headers=headers)
        assert (status, body["title"]) == (401, "Unauthorized"), path
        assert why in body["detail"] and "OPENTINKER_API_KEY" in body["hint"] and OPERATOR not in str(body)
    status, body = await api("GET", "/v1/jobs/x/v1/models", headers=headers)  # as OpenAI's API says it
    assert status == 401 and why in body["error"]["message"] and body["error"]["code"] == "invalid_api_key"
    assert [(await api("GET", path, headers=headers))[0] for path in ("/healthz", "/readyz")] == [200, 200]


async def test_clients_of_tinker_show_their_key_in_a_header_of_their_own(api: Http, store: Store) -> None:
    key, path = await new_key_of(store, role=Role.VIEWER), "/api/v1/get_server_capabilities"
    for shown in (f"tml-{key}", key):
        assert await api("GET", path, headers={"X-API-Key": shown}) == (200, {"supported_models": []})
        assert (await api("GET", "/v1/jobs", headers={"X-API-Key": shown}))[0] == 401
    for wrong, why in (("", "API key required"), ("tml-x", "malformed"), (f"tml-{new_key('local')}", "unknown")):
        status, body = await api("GET", path, headers={"X-API-Key": wrong})
        assert status == 401 and why in body["detail"] and "TINKER_API_KEY" in body["hint"]
    status, body = await api("POST", "/api/v1/copy_weights", headers={"X-API-Key": f"tml-{key}"})
    assert status == 404 and "not served" in body["detail"]


async def test_an_impossible_key_costs_no_redis_call(api: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise RedisError("away")

    monkeypatch.setattr(KeyStore, "find", away)
    answers = [(await api("GET", "/v1/jobs", headers={"Authorization": header or ""}))[0] for header, _ in BAD[:5]]
    assert answers == [401] * 5
    assert (await api("GET", "/v1/jobs", headers=bearing(new_key("elsewhere"))))[0] == 401
    assert (await api("GET", "/v1/jobs", headers=bearing(new_key("local"))))[0] == 503


async def test_guesses_delay_only_guesses(api: Http, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key, find, go_on = await new_key_of(store), KeyStore.find, asyncio.Event()
    _, known = parse(key) or ("", "")
    assert (await api("GET", "/v1/jobs", headers=bearing(key)))[0] == 200
    looked_up: list[str] = []

    async def slowly(self: KeyStore, id: str) -> Key | None:
        looked_up.append(id)
        if id != known:
            await go_on.wait()
        return await find(self, id)

    async def known_again() -> bool:
        """Whether the known key was looked up again: it is cached for a moment."""
        assert (await api("GET", "/v1/jobs", headers=bearing(key)))[0] == 200
        return known in looked_up

    monkeypatch.setattr(KeyStore, "find", slowly)
    guesses = [asyncio.create_task(api("GET", "/v1/jobs", headers=bearing(new_key("local")))) for _ in range(50)]
    await until(lambda: len(looked_up) == MAX_UNKNOWN_LOOKUPS)
    await until(known_again)
    unknown = [id for id in looked_up if id != known]
    assert len(unknown) == MAX_UNKNOWN_LOOKUPS and not any(guess.done() for guess in guesses)
    go_on.set()
    assert {status for status, _ in await asyncio.gather(*guesses)} == {401}


async def test_key_use_is_noted_once_a_minute(api: Http, store: Store) -> None:
    key, keys = await new_key_of(store), KeyStore(store.redis)
    _, id = parse(key) or ("", "")
    began = time.time()
    for header in (f"Bearer {key}", f"bearer  {key}"):
        status, body = await api("GET", "/v1/jobs", headers={"Authorization": header})
        assert (status, body["jobs"]) == (200, [])
    found = await keys.find(id)
    assert found is not None and found.used >= began
    await keys.note_use(found, found.used + 59.0)
    assert await keys.find(id) == found
    await keys.note_use(found, found.used + 60.0)
    assert await keys.find(id) == msgspec.structs.replace(found, used=found.used + 60.0)


async def test_a_revoked_key_is_refused_by_all_schedulers(ctx: Context, store: Store, tmp_path: Path) -> None:
    second = Context(**{**vars(ctx), "worker": "scheduler-1", "stopping": asyncio.Event(), "detail": {}})
    async with scheduler(ctx) as url, scheduler(second) as other, aiohttp.ClientSession() as session:
        for end, why in (("revoke", "revoked"), ("expire", "expired"), ("rotate", "rotated")):
            key = await new_key_of(store)
            _, id = parse(key) or ("", "")
            both = [Http(session, url), Http(session, other)]
            assert [(await http("GET", "/v1/jobs", headers=bearing(key)))[0] for http in both] == [200, 200]
            now = time.time()
            match end:
                case "revoke":
                    await KeyStore(store.redis).revoke(id, now=now)
                case "expire":
                    await store.redis.hset(f"key:{id}", "expires", now)
                case "rotate":
                    await KeyStore(store.redis).rotate(id, new_key("local", id), now=now, grace_s=0.0)
            await asyncio.sleep(CACHE_S)  # what is believed for so long is believed no longer
            for http in both:
                status, body = await http("GET", "/v1/jobs", headers=bearing(key))
                assert status == 401 and (why in body["detail"] or "unknown API key" in body["detail"])
    assert CACHE_S + RECHECK_S < 1.0


async def test_what_a_key_has_open_is_cut_off_when_it_is_over(api: Http, store: Store) -> None:
    key, stays = await new_key_of(store), await new_key_of(store)
    _, job = await api("POST", "/v1/jobs", data=orjson.dumps(SPEC), headers=bearing(key))
    events = f"{api.url}/v1/jobs/{job['id']}/events"
    async with (
        api.session.get(events, headers=bearing(key)) as ending,
        api.session.get(events, headers=bearing(stays)) as staying,
        api.session.ws_connect(f"{api.url}/v1/served/x", headers=bearing(key)) as socket,
    ):
        assert len(await soon(read_events(ending, 1))) == len(await soon(read_events(staying, 1))) == 1
        await KeyStore(store.redis).revoke((parse(key) or ("", ""))[1], now=time.time())
        with pytest.raises(aiohttp.ClientPayloadError):
            await soon(ending.content.read())
        assert (await soon(socket.receive())).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        await api("POST", f"/v1/jobs/{job['id']}/cancel", headers=bearing(stays))
        assert (await soon(read_events(staying)))[-1]["event"] == "cancelled"
