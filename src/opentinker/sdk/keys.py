"""Administration from Python: API keys (create, list, rotate, revoke), sessions of the page and workers (free)."""

from __future__ import annotations

from collections.abc import Sequence

from opentinker.sdk.http import Http, resource
from opentinker.shared.api_types import (
    FreedWorker,
    Key,
    Keys,
    MadeKey,
    Session,
    Sessions,
    Share,
    SignedOut,
    Tenant,
    Tenants,
    WebhookSecret,
    WhoAmI,
)

KEYS = "/v1/keys"


class KeyCalls:
    """Calls of AsyncClient for keys. A call that makes a secret is not retried: a lost answer is a lost secret."""

    _http: Http

    async def create_key(
        self,
        role: str,
        *,
        tenant: str | None = None,
        name: str = "",
        scopes: Sequence[str] | None = None,
        expires_in_s: float | None = None,
    ) -> MadeKey:
        """The answer's `key` is the whole of it, seen nowhere else. `tenant` defaults to that of the key that asks."""
        asked = {"tenant": tenant, "scopes": scopes and list(scopes), "expires_in_s": expires_in_s}
        body = {"role": role, "name": name} | {field: value for field, value in asked.items() if value is not None}
        return await self._http.json(MadeKey, "POST", KEYS, noun=body, again=False)

    async def share(self, *jobs: str, expires_in_s: float | None = None, name: str = "") -> str:
        """Return a link that shows these jobs, and nothing else, to everyone who has it; by default for a week."""
        body = {"jobs": list(jobs), "name": name} | ({} if expires_in_s is None else {"expires_in_s": expires_in_s})
        made = await self._http.json(Share, "POST", "/v1/shares", noun=body, again=False)
        return self._http.url + made["address"]

    async def keys(self, tenant: str | None = None) -> list[Key]:
        """The keys of a tenant (default: yours), oldest first, without secrets."""
        return (await self._http.json(Keys, "GET", KEYS, {"tenant": tenant} if tenant else {}))["keys"]

    async def rotate_key(self, id: str, *, grace_s: float | None = None) -> MadeKey:
        """The answer's `key` is the new one; the one before stays valid for `grace_s`, by default a day."""
        body = {} if grace_s is None else {"grace_s": grace_s}
        return await self._http.json(MadeKey, "POST", resource("keys", id, "/rotate"), noun=body, again=False)

    async def revoke_key(self, id: str) -> Key:
        """Make a key invalid within a second; its open connections are closed."""
        return await self._http.json(Key, "POST", resource("keys", id, "/revoke"))

    async def sessions(self, tenant: str | None = None) -> list[Session]:
        """The sessions of the page of a tenant (default: yours); those that end first come first."""
        asked = {"tenant": tenant} if tenant else {}
        return (await self._http.json(Sessions, "GET", "/v1/sessions", asked))["sessions"]

    async def end_session(self, id: str) -> None:
        """Sign somebody out of the page, within a second."""
        await self._http.json(SignedOut, "POST", resource("sessions", id, "/revoke"))

    async def whoami(self) -> WhoAmI:
        """Return the identity of the key that is sent: `tenant`, `role`, `scopes`, `key` (its id), `name`, `expires`;
        and `auth`, which is `off` if the server requires no key."""
        return await self._http.json(WhoAmI, "GET", "/v1/whoami")

    async def webhook_secret(self, *, renew: bool = False) -> str:
        """Return what your tenant's webhooks (`notify.url` of a spec) are signed with; `renew` replaces it."""
        method = "POST" if renew else "GET"
        return (await self._http.json(WebhookSecret, method, "/v1/webhook-secret", again=not renew))["secret"]

    async def tenants(self) -> list[Tenant]:
        """The tenants that have had a key. For operators."""
        return (await self._http.json(Tenants, "GET", "/v1/tenants"))["tenants"]

    async def free_worker(self, id: str) -> FreedWorker:
        """Cancel the job that holds this worker, whosever it is. For operators."""
        return await self._http.json(FreedWorker, "POST", resource("workers", id, "/free"))
