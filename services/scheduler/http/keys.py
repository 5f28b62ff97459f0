"""Handlers of /v1/keys, /v1/shares, /v1/tenants and /v1/webhook-secret. A key's secret
is in one answer alone: the one that makes it.

No one grants more than they have: creating, rotating or revoking a key requires all rights of that key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, model_validator

from opentinker.services.scheduler.http.auth import may_see, principal_of, tenant_of
from opentinker.services.scheduler.http.errors import Body, json_response, parsed, read_json
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.shared import api_types
from opentinker.shared.durable_files import file_system
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import DEFAULT_TENANT, MAY, TENANT, Action, Role, outranks
from opentinker.shared.security.key_text import KEY_ID, new_key
from opentinker.shared.state.keys import Key, KeyStore
from opentinker.shared.state.notifications import Notifications
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.mistakes import Mistakes

DAY_S = 86400.0
GRACE_S = DAY_S
NO_STORE = {"Cache-Control": "no-store"}
MAX_SHARED = 50
"""Jobs of one share link."""
MAX_SHARES = 200
"""Share links of a tenant."""
JobName = Annotated[str, Field(pattern=r"^j-[a-z0-9]{1,40}$")]

OF_TENANT = Parameter("tenant", "For operators: another tenant; default: your own.")


class NewKey(Body):
    """The body of POST /v1/keys."""

    role: Role
    tenant: Annotated[str, Field(pattern=f"^{TENANT.pattern}$")] | None = None
    """Default: that of the key that asks. An operator may name any; its first key makes a tenant."""
    name: Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """For people."""
    scopes: list[Action] | None = None
    """Actions to which the key is confined; default: all of its role."""
    expires_in_s: Annotated[float, Field(ge=1, le=3650 * DAY_S)] | None = None
    """Default: never."""

    @model_validator(mode="after")
    def _of_its_role(self) -> NewKey:
        beyond = sorted(set(self.scopes or ()) - MAY[self.role])
        if beyond:
            scopes = f"the scope{'s' if len(beyond) > 1 else ''} {', '.join(beyond)}"
            can = ", ".join(sorted(MAY[self.role]))
            problem = f"{self.role.with_article} key cannot have {scopes}; it can have: {can}"
            raise Mistakes([{"field": "scopes", "value": beyond, "problem": problem}])
        if self.scopes == []:
            raise Mistakes([{"field": "scopes", "value": [], "problem": "leave it out for all that the role allows"}])
        return self


class Rotation(Body):
    """The body of POST /v1/keys/{id}/rotate."""

    grace_s: Annotated[float, Field(ge=0, le=30 * DAY_S)] = GRACE_S
    """How long the secret before it stays valid."""


class NewShare(Body):
    """The body of POST /v1/shares."""

    jobs: Annotated[list[JobName], Field(min_length=1, max_length=MAX_SHARED)]
    """Ids of the jobs that the link shows."""
    expires_in_s: Annotated[float, Field(ge=60, le=90 * DAY_S)] = 7 * DAY_S
    """From now on."""
    name: Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """For people."""


class KeysApi:
    def __init__(self, ctx: Context) -> None:
        self._jobs = ctx.store
        self._env, self._asks = ctx.settings.key_env, ctx.settings.auth
        self._keys, self._notifications = KeyStore(ctx.store.redis), Notifications(ctx.store.redis)

    @Route("POST", "/v1/keys", Action.KEYS_WRITE, status=201, body=NewKey, answer=api_types.MadeKey)
    async def create(self, request: web.Request) -> web.Response:
        """Create an API key; the response is the only place that shows it."""
        asked = parsed(NewKey, await read_json(request))
        tenant = asked.tenant or tenant_of(request)
        if not may_see(request, tenant):
            raise _no_tenant(tenant)
        if asked.role is Role.OPERATOR and tenant != DEFAULT_TENANT:
            raise SpecError.of("role", asked.role, f"operators belong to tenant {DEFAULT_TENANT}")
        _refuse_more(request, asked.role, asked.scopes)
        now, text = time.time(), new_key(self._env)
        expires = 0.0 if asked.expires_in_s is None else now + asked.expires_in_s
        key = await self._keys.create(
            text, now=now, tenant=tenant, role=asked.role, scopes=asked.scopes, name=asked.name,
            by=principal_of(request).name, expires=expires,
        )  # fmt: skip
        return json_response({"key": text, **_shown(key, now)}, 201, NO_STORE)

    @Route("POST", "/v1/shares", Action.JOBS_WRITE, status=201, body=NewShare, answer=api_types.Share)
    async def share(self, request: web.Request) -> web.Response:
        """Make a link that gives read access to jobs, for a limited time, to everyone who has the link.

        Its key is listed and revoked like others."""
        asked, tenant = parsed(NewShare, await read_json(request)), tenant_of(request)
        if not self._asks:
            raise Conflict("this server requires no key: its addresses need no share link")
        found = {job.id for job in await self._jobs.jobs(asked.jobs) if may_see(request, job.tenant)}
        if missing := sorted(set(asked.jobs) - found):
            raise SpecError.of("jobs", missing, "you have no such job")
        if sum(bool(key.jobs) for key in await self._keys.of(tenant)) >= MAX_SHARES:
            raise Conflict(f"tenant {tenant} has {MAX_SHARES} share links; those that have ended count for a month")
        now, text = time.time(), new_key(self._env)
        key = await self._keys.create(
            text, now=now, tenant=tenant, role=Role.VIEWER, scopes=[Action.JOBS_READ], name=asked.name,
            by=principal_of(request).name, expires=now + asked.expires_in_s, jobs=sorted(found),
        )  # fmt: skip
        at = f"compare/{','.join(asked.jobs)}" if len(asked.jobs) > 1 else f"jobs/{asked.jobs[0]}"
        return json_response({"address": f"/#/share/{text}/{at}", "key": text, **_shown(key, now)}, 201, NO_STORE)

    @Route("GET", "/v1/keys", Action.KEYS_READ, parameters=(OF_TENANT,), answer=api_types.Keys)
    async def list(self, request: web.Request) -> web.Response:
        """List API keys, oldest first, without their secrets."""
        tenant = request.query.get("tenant", tenant_of(request))
        if tenant != tenant_of(request) and not (may_see(request, tenant) and tenant in await self._keys.tenants()):
            raise _no_tenant(tenant)
        now = time.time()
        return json_response({"keys": [_shown(key, now) for key in await self._keys.of(tenant)]})

    @Route("POST", "/v1/keys/{id}/rotate", Action.KEYS_WRITE, body=Rotation, answer=api_types.MadeKey)
    async def rotate(self, request: web.Request) -> web.Response:
        """Rotate an API key: replace its secret; the response is the only place that shows it.

        Its id and rights stay."""
        key = await self._found(request)
        raw = await read_json(request) if request.can_read_body else {}
        grace_s = parsed(Rotation, raw).grace_s
        now, text = time.time(), new_key(self._env, key.id)
        await self._keys.rotate(key.id, text, now=now, grace_s=grace_s)
        return json_response({"key": text, **_shown(await self._known(key.id), now)}, headers=NO_STORE)

    @Route("POST", "/v1/keys/{id}/revoke", Action.KEYS_WRITE, answer=api_types.Key)
    async def revoke(self, request: web.Request) -> web.Response:
        """Revoke an API key.

        Revoking what is revoked already is fine: the call may be repeated."""
        key = await self._found(request)
        now = time.time()
        await self._keys.revoke(key.id, now=now)
        return json_response(_shown(await self._known(key.id), now))

    @Route("GET", "/v1/whoami", Action.ABOUT, answer=api_types.WhoAmI)
    async def whoami(self, request: web.Request) -> web.Response:
        """Show the caller's tenant, role and scopes.

        Without authentication: an operator, and `auth` explains it."""
        asked = principal_of(request)
        key = await self._keys.find(asked.key) if asked.key else None
        return json_response(
            {
                "auth": "on" if self._asks else "off",
                "tenant": asked.tenant,
                "role": asked.role,
                "scopes": sorted(asked.may),
                "key": asked.key or None,
                "user": asked.user or None,
                "name": key.name if key else "",
                "expires": (key.expires or None) if key else None,
                "jobs": sorted(asked.jobs),
                "files": file_system(),
            }
        )

    @Route("GET", "/v1/tenants", Action.SERVER_READ, answer=api_types.Tenants)
    async def tenants(self, _: web.Request) -> web.Response:
        """List tenants."""
        found = await self._keys.tenants()
        return json_response({"tenants": [{"name": name, "since": since} for name, since in found.items()]})

    @Route("GET", "/v1/webhook-secret", Action.JOBS_WRITE, answer=api_types.WebhookSecret)
    async def webhook_secret(self, request: web.Request) -> web.Response:
        """Show the secret that your tenant's webhooks are signed with."""
        return json_response({"secret": await self._notifications.secret(tenant_of(request))}, headers=NO_STORE)

    @Route("POST", "/v1/webhook-secret", Action.JOBS_WRITE, answer=api_types.WebhookSecret)
    async def renew_webhook_secret(self, request: web.Request) -> web.Response:
        """Replace the secret that your tenant's webhooks are signed with; the old one is used no more."""
        secret = await self._notifications.secret(tenant_of(request), renew=True)
        return json_response({"secret": secret}, headers=NO_STORE)

    async def _found(self, request: web.Request) -> Key:
        """Raises NotFound, HTTPForbidden; a key of another tenant looks like one that does not exist."""
        id = request.match_info["id"]
        key = await self._keys.find(id) if KEY_ID.fullmatch(id) else None
        if key is None or not may_see(request, key.tenant):
            raise NotFound(f"you have no key {id[:100]!r}")
        _refuse_more(request, key.role, sorted(key.principal.scopes))
        return key

    async def _known(self, id: str) -> Key:
        key = await self._keys.find(id)
        if key is None:  # forgotten since
            raise NotFound(f"you have no key {id!r}")
        return key


def _refuse_more(request: web.Request, role: Role, scopes: Sequence[Action] | None) -> None:
    principal = principal_of(request)
    if not outranks(principal, role, MAY[role] if scopes is None else scopes):
        own = f"you lack as {principal.role.with_article}" if principal.user else f"your {principal.role} key lacks"
        raise web.HTTPForbidden(text=f"{role.with_article} key with these scopes has rights that {own}")


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"no tenant {name[:100]!r} whose keys you may see")


def _shown(key: Key, now: float) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "role": key.role,
        "scopes": sorted(key.principal.may),
        "name": key.name,
        "state": key.state(now),
        "created": key.created,
        "created_by": key.by,
        "expires": key.expires or None,
        "jobs": sorted(key.principal.jobs),
        "last_used": key.used or None,
        "previous_valid_until": key.old_until if key.old_until > now else None,
    }
