"""The isolation matrix: every route, for whoever may ask, on objects of their own, of other tenants, and of nobody.

    pytest tests/integration/access/test_matrix.py             says how many cells were asserted

Routes are taken from the table of the running server, so a new one is here as soon as it is there; if it takes
something that nobody has told this file about (`PLACES`, `BODIES`), the test says so. What each role may is read from
docs/keys.md, so that page is what is tested.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from pydantic import BaseModel

from opentinker.client import AsyncClient
from opentinker.services.scheduler.environments.check_reports_api import CheckReport
from opentinker.services.scheduler.environments.plays_api import PlayedTurn, PlayRequest, SeatsRequest
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.http import auth
from opentinker.services.scheduler.http.errors import TINKER
from opentinker.services.scheduler.http.keys import NewKey, NewShare, Rotation
from opentinker.services.scheduler.http.publishing import NewPublication
from opentinker.services.scheduler.http.rate_limit import TokenBuckets
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.http.server import Api
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.services.scheduler.tinker import downloads_api
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import DEFAULT_TENANT, Action, Principal, Role, Verdict
from opentinker.shared.security.key_text import parse
from opentinker.shared.security.secrets import CLIENT_SECRET
from opentinker.shared.spec.labels import LabelChanges
from opentinker.shared.spec.sweeps.children import SubmittedSpec, SweepSpec
from opentinker.shared.state.plays import Play, Plays
from opentinker.shared.state.sessions import session_id
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import LoraShape, Sampler, TinkerModel, TinkerSession
from tests.conftest import Figure
from tests.integration.access.askers import COLUMNS, MAY, PROVIDER, Who, session_of
from tests.integration.tinker.site import BASE, checkpoint_of, start_server
from tests.samples.upload_samples import package
from tests.support.api import SPEC, Http, bearing, fits, new_key_of, write_checkpoint
from tests.support.browsing import showing
from tests.support.scheduling import scheduler

OWN, FOREIGN, UNKNOWN = "own", "foreign", "unknown"
TENANTS = ("red", "blue", DEFAULT_TENANT)
"""Whose objects there are; operators are of the last one."""
SERVER = {Action.SERVER_READ, Action.SERVER_WRITE, Action.FREE, Action.ABOUT}
"""What these answer is about all tenants."""


@dataclass(frozen=True)
class Things:
    """One tenant's, or nobody's."""

    job: str
    environment: str
    key: str
    publication: str
    check: str
    sweep: str
    session: str
    play: str
    tinker_session: str
    model: str
    sampler: str

    def of(self, route: Route) -> dict[str, str]:
        """Return the values for the places in the route's path. Raises KeyError for a place that this file does not
        know."""
        parts = route.path.split("/")
        family = "/".join(parts[1:4]) if route.path.startswith(TINKER) else parts[2]
        return {place: str(getattr(self, name, name)) for place, name in PLACES.get(family, {}).items()}


PLACES: dict[str, dict[str, str]] = {
    "jobs": {"id": "job", "step": "latest", "model": "any"},
    "environments": {"name": "environment"},
    "keys": {"id": "key"},
    "published": {"name": "publication"},
    "checks": {"check": "check"},
    "sweeps": {"id": "sweep"},
    "sessions": {"id": "session"},
    "plays": {"play": "play"},
    "api/v1/sessions": {"id": "tinker_session"},
    "api/v1/samplers": {"id": "sampler"},
    "api/v1/training_runs": {"model": "model", "kind": "weights", "name": "first"},
}
"""By the first part of a path below /v1, by the whole of it below /api/v1: whose name stands where, or what else."""
MAKES = {
    ("GET", "/v1/served/{name}"): {"name": "anything"},
    ("GET", "/page/{name}"): {"name": "icon.svg"},
    ("POST", "/v1/workers/{worker}/free"): {"worker": "rollout-none"},
    ("GET", downloads_api.FILES): {"model": "any", "kind": "weights", "name": "any", "file": "any"},
}
"""Routes whose path names what is to be made, or is everybody's: there is none that could be another's."""
CHECK: Any = {
    "environment": "x", "verdict": "good", "errors": [], "advice": [], "facts": {}, "transcript": "", "columns": [],
    "rows": [],
}  # fmt: skip
BODIES: dict[type[BaseModel], Any] = {
    CheckReport: CHECK,
    SubmittedSpec: SPEC,
    NewKey: {"role": "viewer"},
    NewShare: {"jobs": ["j-0000000000"]},
    Rotation: {"grace_s": 60},
    LabelChanges: {"notes": "x"},
    SweepSpec: {**SPEC, "sweep": {"parameters": {"rollout.toy.skill": [0.5]}}},
    PlayRequest: {"environment": {"name": "copy_digits"}},
    SeatsRequest: {"environment": {"name": "copy_digits"}},
    PlayedTurn: {"turn": 9, "actions": [{}]},
    NewPublication: {"name": "x", "checkpoint": "j-0000000000@latest"},
}
ANY_BODY: dict[str, Any] = {"application/json": {}, "application/x-tar": None}
"""By media type: refused, but by who would be allowed to send a better one."""


def places(route: Route) -> set[str]:
    return set(re.findall(r"{(\w+)}", route.path))


def has_object(route: Route) -> bool:
    return bool(places(route)) and (route.method, route.path) not in MAKES


def called(route: Route, things: Things) -> tuple[str, dict[str, Any]]:
    """Path and request."""
    names = MAKES.get((route.method, route.path)) or (things.of(route) if places(route) else {})
    assert places(route) <= names.keys(), f"tell PLACES what stands in {route.path}"
    request: dict[str, Any] = {"allow_redirects": False}
    if any(p.name == "format" for p in route.parameters):
        request["params"] = {"format": "json"}  # not the stream, which has no end
    if route.body is not None:
        assert route.body in BODIES, f"tell BODIES what {route.method} {route.path} takes"
        request["data"] = orjson.dumps(BODIES[route.body])
    elif route.takes:
        assert route.takes in ANY_BODY, f"tell ANY_BODY what {route.method} {route.path} takes"
        request["data"] = orjson.dumps(ANY_BODY[route.takes])
    return route.path.format(**names), request


# --- one server -----------------------------------------------------------------------------------------------------


@dataclass
class Site:
    http: Http
    routes: list[Route]
    things: dict[str, Things]
    """By tenant."""


@pytest.fixture
async def site(ctx: Context, store: Store, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    made: list[Api] = []

    class Noted(Api):
        def __init__(self, ctx: Context, gate: auth.AuthMiddleware, *parts: Any) -> None:
            super().__init__(ctx, gate, *parts)
            gate._guesses = TokenBuckets(1e6, 1e6)  # thousands of unknown keys of one address are asked with
            made.append(self)

    monkeypatch.setattr("opentinker.services.scheduler.http.server.Api", Noted)
    monkeypatch.setenv(CLIENT_SECRET, "a-client-secret")
    ctx.settings = Settings.model_validate({**dict(ctx.settings), **PROVIDER})
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        http = Http(session, url)
        things = {}
        for tenant in TENANTS:
            own = f"{tenant}-only"
            place = package(tmp_path / tenant, environment__toml=f'name = "{own}"\nclass = "small:Small"\n')
            async with AsyncClient(url, api_key=await new_key_of(store, tenant)) as client:
                await client.push_environment(place)
                job = (await client.submit(SPEC))["id"]
                write_checkpoint(ctx, job, 1, {"model.safetensors": b"weights"})
                report: Any = {**CHECK, "environment": own}
                check = (await client.save_check(report))["id"]
                publication = (await client.publish(f"{job}@1", f"{tenant}-best"))["name"]
                sweep = (await client.sweep({**SPEC, "sweep": BODIES[SweepSpec]["sweep"]}))["id"]
            play = Play(id=f"{tenant}-play", environment=own, worker="env-gone", together=False, seats=[""])
            await Plays(store.redis).begin(tenant, "", play, time.time())
            key = (parse(await new_key_of(store, tenant, Role.VIEWER)) or ("", ""))[1]
            signed = session_id(await session_of(store, tenant, Role.VIEWER)) or ""
            tinker = await tinker_things(ctx, tenant)
            things[tenant] = Things(job, own, key, publication, check, sweep, signed, play.id, *tinker)
        yield Site(http, made[0].routes, things)


async def tinker_things(ctx: Context, tenant: str) -> tuple[str, str, str]:
    """A session of the Tinker API, a model with a checkpoint, a sampler."""
    store, id = TinkerStore(ctx.store.redis), f"s-{hashlib.sha256(tenant.encode()).hexdigest()[:20]}"
    job = await start_server(ctx, tenant)
    await store.open_session(TinkerSession(id=id, tenant=tenant, created=time.time()))
    shape: dict[str, Any] = {"base": BASE, "tenant": tenant, "job": job}
    model, sampler = f"{id}:train:0", f"{id}:sampler:0"
    await store.add_model(TinkerModel(id=model, lora=LoraShape(rank=8), created=time.time(), **shape))
    await store.add_sampler(Sampler(id=sampler, session=id, **shape))
    await store.add_checkpoint(checkpoint_of(ctx, model, tenant))
    return id, model, sampler


def order(route: Route) -> tuple[int, str]:
    """What ends an object comes last."""
    ends = ("/revoke", "/cancel", "/complete")
    last = (route.method == "DELETE" and not route.path.endswith("/publish")) or route.path.endswith(ends)
    return (3 if route.path == "/v1/session" else 2 if last else 0 if route.method == "GET" else 1), route.path


# --- the cells ------------------------------------------------------------------------------------------------------


def changes(who: Who) -> bool:
    return who.may is not None and any(not action.endswith(":read") for action in who.may)


QUIET = [who for who in COLUMNS if not changes(who)]
"""These change no object, so they ask one after the other."""
CONFINED = [who for who in COLUMNS if changes(who) and who.may is not None and len(who.may) == 1]
"""So do these: each changes objects of its own kind alone."""
ALONE = [[who] for who in COLUMNS if changes(who) and who not in CONFINED]


@pytest.mark.parametrize("askers", [QUIET, CONFINED, *ALONE], ids=lambda who: who[-1].name)
async def test_every_route_answers_whom_it_should_and_nobody_else(site: Site, store: Store, askers: list[Who]) -> None:
    for who in askers:
        await answers_as_documented(site, store, who)


async def answers_as_documented(site: Site, store: Store, who: Who) -> None:
    key = await who.key(store)
    headers = {} if not key else showing(site.http.url, key) if session_id(key) else bearing(key)
    wrong: list[str] = []
    cells = 0
    for route in sorted(site.routes, key=order):
        answers: dict[str, tuple[int, str]] = {}
        for whose, things in objects(site, who, route).items():
            path, request = called(route, things)
            status, body = await site.http(route.method, path, headers=headers, **request)
            answers[whose] = (status, said(body, things))
            cells += 1
            if route.answer is not None and status == route.status:
                fits(body, route.answer)
            if others := seen(site, who, route, things, body):
                wrong.append(f"{route.method} {path} ({whose}): shows {others}")
        wrong += [f"{route.method} {route.path}: {why}" for why in judged(who, route, answers)]
    assert wrong == [], who.name
    assert cells == count(site.routes)


def test_how_many_cells_there_are(ctx: Context, figure: Figure) -> None:
    routes = Api(ctx, auth.AuthMiddleware(ctx), Gateway(ctx), InferenceRouter(ctx)).routes
    total = len(COLUMNS) * count(routes)
    figure(f"isolation matrix: {len(routes)} routes x {len(COLUMNS)} kinds of asker = {total} cells")
    assert len({who.name for who in COLUMNS}) == len(COLUMNS) and total > 1000


def count(routes: list[Route]) -> int:
    """Of one column."""
    return sum(3 if has_object(route) else 1 for route in routes)


def objects(site: Site, who: Who, route: Route) -> dict[str, Things]:
    """What is asked for: one's own, another tenant's, what is not there. A server's own route has one cell."""
    own = who.tenant or "red"
    if not has_object(route):
        return {OWN: site.things[own]}
    other = "blue" if own == "red" else "red"
    nothing = Things(
        "j-0000000000",
        "no-such-thing",
        "0000000000",
        "no-such-name",
        "no-such-check",
        "s-0000000000",
        "0000000000",
        "no-such-play",
        f"s-{'f' * 20}",
        f"s-{'f' * 20}:train:0",
        f"s-{'f' * 20}:sampler:0",
    )
    return {UNKNOWN: nothing, FOREIGN: site.things[other], OWN: site.things[own]}


def said(body: Any, things: Things) -> str:
    """The answer without the names that were asked for."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else orjson.dumps(body).decode()
    for name in sorted(vars(things).values(), key=len, reverse=True):  # a model's contains its session's
        text = text.replace(name, "X")
    return text


def seen(site: Site, who: Who, route: Route, asked: Things, body: Any) -> list[str]:
    """Names of other tenants' things that the answer has, and that were not in the question."""
    text = said(body, asked)
    others = [name for tenant in TENANTS if tenant != who.tenant for name in vars(site.things[tenant]).values()]
    return [] if route.action in SERVER else [name for name in others if name in text]


def judged(who: Who, route: Route, answers: dict[str, tuple[int, str]]) -> list[str]:
    statuses = {whose: status for whose, (status, _) in answers.items()}
    wrong = [f"{whose}: {status}" for whose, status in statuses.items() if status >= 500]
    if route.action is Action.FREE:
        return wrong + [f"{whose}: {status}, free" for whose, status in statuses.items() if status in (401, 403)]
    if who.may is None:
        return wrong + [f"{whose}: {status}, not 401" for whose, status in statuses.items() if status != 401]
    if route.action is not Action.ABOUT and route.action not in who.may:
        return wrong + [f"{whose}: {status}, not 403" for whose, status in statuses.items() if status != 403]
    if route.action is Action.KEYS_WRITE and not who.may >= MAY[Role.VIEWER]:  # nobody gives more than they have
        return wrong + ([f"{OWN}: {statuses[OWN]}, not 403"] if statuses[OWN] != 403 else [])
    wrong += [f"{OWN}: {statuses[OWN]}"] if statuses[OWN] in (401, 403) else []
    if UNKNOWN in answers:
        wrong += [] if answers[OWN] != answers[UNKNOWN] else [f"own looks like unknown: {answers[OWN]}"]
        reaches = route.action is Action.KEYS_WRITE and who.name.endswith("operator")
        if reaches and answers[FOREIGN] == answers[UNKNOWN]:
            wrong.append("an operator does not reach another tenant's key")
        if not reaches and answers[FOREIGN] != answers[UNKNOWN]:
            wrong.append(f"foreign {answers[FOREIGN]} differs from unknown {answers[UNKNOWN]}")
        wrong += [] if statuses[UNKNOWN] == 404 else [f"unknown: {statuses[UNKNOWN]}, not 404"]
    return wrong


async def test_the_matrix_has_every_operation_of_the_openapi_document(site: Site, store: Store) -> None:
    key = await new_key_of(store, DEFAULT_TENANT, Role.OPERATOR)
    _, document = await site.http("GET", "/openapi.json", headers=bearing(key))
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(route.method, route.path) for route in site.routes}


# --- the way they go ------------------------------------------------------------------------------------------------


async def test_no_route_opens_but_through_authorize(site: Site, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it forbids everything, nothing opens, not for an operator either."""
    asked: list[Action] = []

    def forbids(_: Principal | None, action: Action, tenant: str | None = None) -> Verdict:
        asked.append(action)
        return Verdict.FORBIDDEN

    key = await new_key_of(store, DEFAULT_TENANT, Role.OPERATOR)
    monkeypatch.setattr(auth, "authorize", forbids)
    for route in site.routes:
        path, request = called(route, site.things[DEFAULT_TENANT])
        status, _ = await site.http(route.method, path, headers=bearing(key), **request)
        assert (status == 403) is (route.action is not Action.FREE), route.path
    assert asked == [route.action for route in site.routes if route.action is not Action.FREE]


def test_nothing_is_served_that_is_not_in_the_table(ctx: Context) -> None:
    api = Api(ctx, auth.AuthMiddleware(ctx), Gateway(ctx), InferenceRouter(ctx))
    served = [(route.method, route.resource.canonical) for route in api.app().router.routes() if route.resource]
    free = [("HEAD", route.path) for route in api.routes if route.action is Action.FREE]
    assert sorted(served) == sorted([*((route.method, route.path) for route in api.routes), *free])
    assert all(isinstance(route.action, Action) for route in api.routes)
    assert {path for _, path in free} == {
        "/healthz",
        "/readyz",
        "/",
        "/docs",
        "/page/{name}",
        "/v1/schema/job.json",
        "/v1/login",
        "/v1/login/oidc",
        "/v1/login/oidc/callback",
        "/api/v1/healthz",
        downloads_api.FILES,
    }
