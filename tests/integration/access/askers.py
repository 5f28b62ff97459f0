"""Who asks in the isolation matrix: keys and sessions of every role and tenant, and those that are worth nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from opentinker.shared.security.authorization import DEFAULT_TENANT, SCOPES, Action, Role
from opentinker.shared.security.key_text import digest_of, new_key, parse
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.sessions import SessionStore, SignIn, session_id
from opentinker.shared.state.store import Store
from tests.support.api import new_key_of
from tests.support.cluster import ROOT


@dataclass(frozen=True)
class Who:
    """A column. `may` None: no key at all, or none that is worth anything."""

    name: str
    key: Callable[[Store], Coroutine[Any, Any, str]]
    may: frozenset[str] | None
    tenant: str = ""


def documented() -> dict[Role, frozenset[str]]:
    """Return the actions of each role according to docs/keys.md."""
    lines = (ROOT / "docs" / "keys.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| | viewer"))
    roles = [Role(name.strip()) for name in head.strip("|").split("|")[1:]]
    found: dict[Role, set[str]] = {role: set() for role in roles}
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split("|")
        for role, cell in zip(roles, cells[1:], strict=True):
            found[role] |= set(re.findall(r"`([a-z]+:[a-z]+)`", cells[0].partition(": ")[0])) if cell.strip() else set()
    return {role: frozenset(actions) for role, actions in found.items()}


MAY = documented()


def known(role: Role, tenant: str, scopes: frozenset[Action] | None = None) -> Callable[[Store], Any]:
    return lambda store: new_key_of(store, tenant, role, scopes)


async def nobody(_: Store) -> str:
    return ""


async def session_of(store: Store, tenant: str, role: Role = Role.ADMIN, *, life_s: float = 600.0) -> str:
    """The token of a session that was made with a new key."""
    key, now = await new_key_of(store, tenant, role), time.time()
    made_with: dict[str, Any] = {"key": (parse(key) or ("", ""))[1], "secret": digest_of(key)}
    login = SignIn(created=now, expires=now + life_s, tenant=tenant, **made_with)
    return (await SessionStore(store.redis).create(login))[0]


PROVIDER: dict[str, Any] = {
    "public_url": "http://127.0.0.1:9",
    "oidc_issuer": "http://127.0.0.1:9",
    "oidc_client_id": "opentinker",
    "oidc_groups": {"team": {"tenant": "red", "role": "member"}, "left": {"tenant": "blue", "role": "admin"}},
}
"""Nobody listens there: users have signed in already."""


def user_of(tenant: str, group: str, issuer: str = PROVIDER["oidc_issuer"]) -> Callable[[Store], Any]:
    async def signed(store: Store) -> str:
        now = time.time()
        who: dict[str, Any] = {"user": "ada@lab.example", "subject": "1", "issuer": issuer}
        login = SignIn(created=now, expires=now + 600.0, tenant=tenant, groups=[group], **who)
        return (await SessionStore(store.redis).create(login))[0]

    return signed


def signed_in(role: Role, tenant: str) -> Callable[[Store], Any]:
    return lambda store: session_of(store, tenant, role)


async def ended_session(store: Store) -> str:
    return await session_of(store, "red", life_s=-1.0)


async def session_of_a_revoked_key(store: Store) -> str:
    token = await session_of(store, "red")
    session = await SessionStore(store.redis).found(session_id(token) or "")
    await KeyStore(store.redis).revoke(session.key, now=time.time())
    return token


async def guessed_session(store: Store) -> str:
    """A known id, another secret."""
    return (await session_of(store, "red"))[:-8] + "0" * 8


async def malformed(store: Store) -> str:
    return (await new_key_of(store, "red"))[:-1]


async def never_made(_: Store) -> str:
    return new_key("local")


async def of_another_server(_: Store) -> str:
    return new_key("prod")


async def guessed(store: Store) -> str:
    """A known id, another secret."""
    return new_key("local", (parse(await new_key_of(store, "red")) or ("", ""))[1])


async def expired(store: Store) -> str:
    return await new_key_of(store, "red", expires=time.time() - 1.0)


async def revoked(store: Store) -> str:
    key = await new_key_of(store, "red")
    await KeyStore(store.redis).revoke((parse(key) or ("", ""))[1], now=time.time())
    return key


async def rotated(store: Store) -> str:
    """Its time of grace is over."""
    key = await new_key_of(store, "red")
    id = (parse(key) or ("", ""))[1]
    await KeyStore(store.redis).rotate(id, new_key("local", id), now=time.time() - 10.0, grace_s=5.0)
    return key


async def in_grace(store: Store) -> str:
    key = await new_key_of(store, "red")
    id = (parse(key) or ("", ""))[1]
    await KeyStore(store.redis).rotate(id, new_key("local", id), now=time.time(), grace_s=600.0)
    return key


def confined(scope: Action) -> Who:
    """An operator's key that may one thing alone."""
    only = frozenset({scope})
    return Who(f"only_{scope}", known(Role.OPERATOR, DEFAULT_TENANT, only), only, DEFAULT_TENANT)


WORTHLESS = (
    *(nobody, malformed, never_made, of_another_server, guessed, expired, revoked, rotated),
    *(ended_session, session_of_a_revoked_key, guessed_session),
)
COLUMNS = [
    *(Who(make.__name__, make, None) for make in WORTHLESS),
    Who("in_grace", in_grace, MAY[Role.ADMIN], "red"),
    *(
        Who(f"{tenant}_{role}", known(role, tenant), MAY[role], tenant)
        for tenant in ("red", "blue")
        for role in (Role.VIEWER, Role.MEMBER, Role.ADMIN)
    ),
    *(
        Who(f"{DEFAULT_TENANT}_{role}", known(role, DEFAULT_TENANT), MAY[role], DEFAULT_TENANT)
        for role in (Role.ADMIN, Role.OPERATOR)
    ),
    Who("red_viewer_session", signed_in(Role.VIEWER, "red"), MAY[Role.VIEWER], "red"),
    Who("red_user", user_of("red", "team"), MAY[Role.MEMBER], "red"),
    Who("user_of_another_tenant_now", user_of("red", "left"), None),
    Who("user_without_a_group_now", user_of("red", "gone"), None),
    Who("user_of_another_provider", user_of("red", "team", "https://elsewhere.example"), None),
    Who("blue_admin_session", signed_in(Role.ADMIN, "blue"), MAY[Role.ADMIN], "blue"),
    Who("session_of_an_operator", signed_in(Role.OPERATOR, DEFAULT_TENANT), MAY[Role.OPERATOR], DEFAULT_TENANT),
    *(confined(scope) for scope in sorted(SCOPES)),
]
