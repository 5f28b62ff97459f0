"""Roles, actions, and the one function that decides about access, `authorize`. Pure: no I/O, no state.

    a key  --its record-->  Principal        a route  --its table row-->  Action        an object  -->  its tenant

Members of a tenant see and change what belongs to the tenant. An operator is an admin of the server's tenant who also
sees workers and queues, and the keys of all tenants, and frees workers of the jobs that hold them. No one, operators
included, sees another tenant's jobs: an operator who must makes a key in that tenant, which the audit log records.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
"""Names of tenants."""
DEFAULT_TENANT = "default"
"""Tenant of the first key."""


class Action(StrEnum):
    """The action of a route. Those after ABOUT are also scopes to which a key may be confined."""

    FREE = "free"
    """Requires no key."""
    ABOUT = "about"
    """Allowed for every key: list routes, show the own identity."""
    JOBS_READ = "jobs:read"
    """States, events, metrics, transcripts, and which checkpoints there are."""
    JOBS_WRITE = "jobs:write"
    """Submit, cancel, complete."""
    CHECKPOINTS_READ = "checkpoints:read"
    """Download weights, and other files that jobs leave."""
    CHECKPOINTS_WRITE = "checkpoints:write"
    """Publish, unpublish, delete."""
    INFERENCE_USE = "inference:use"
    """Ask the model of an inference job."""
    ENVIRONMENTS_READ = "environments:read"
    ENVIRONMENTS_WRITE = "environments:write"
    """Push and delete."""
    ENVIRONMENTS_SERVE = "environments:serve"
    """`opentinker env serve`."""
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    """Create, rotate, revoke."""
    SERVER_READ = "server:read"
    """Workers, queues, tenants, Prometheus metrics: of all tenants together."""
    SERVER_WRITE = "server:write"
    """Free a worker: cancel the job that holds it, whosever that is."""


class Role(StrEnum):
    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"
    OPERATOR = "operator"

    @property
    def with_article(self) -> str:
        """`a viewer`, `an admin`"""
        return f"{'an' if self in (Role.ADMIN, Role.OPERATOR) else 'a'} {self.value}"


SCOPES = frozenset(Action) - {Action.FREE, Action.ABOUT}

_VIEWER = {Action.JOBS_READ, Action.CHECKPOINTS_READ, Action.ENVIRONMENTS_READ}
_MEMBER = _VIEWER | {Action.JOBS_WRITE, Action.CHECKPOINTS_WRITE, Action.INFERENCE_USE}
_MEMBER |= {Action.ENVIRONMENTS_WRITE, Action.ENVIRONMENTS_SERVE}
_ADMIN = _MEMBER | {Action.KEYS_READ, Action.KEYS_WRITE}
MAY: dict[Role, frozenset[Action]] = {
    Role.VIEWER: frozenset(_VIEWER),
    Role.MEMBER: frozenset(_MEMBER),
    Role.ADMIN: frozenset(_ADMIN),
    Role.OPERATOR: frozenset(_ADMIN | {Action.SERVER_READ, Action.SERVER_WRITE}),
}
"""Actions of a role, unless the key's scopes restrict them; each role includes those before it."""
EVERYWHERE: dict[Role, frozenset[Action]] = {Role.OPERATOR: frozenset({Action.KEYS_READ, Action.KEYS_WRITE})}
"""Actions of a role on objects of every tenant."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request, with its rights."""

    tenant: str
    role: Role
    key: str
    """Id of the key; empty for users without one, and on a server that asks for none."""
    scopes: frozenset[Action]
    """The key's; what it may is what both its role and these allow."""
    jobs: frozenset[str] = frozenset()
    """Ids of the jobs to which a share link confines it; empty: it is no share link."""
    user: str = ""
    """Name of a user who signed in through the operator's identity provider, without a key."""
    session: str = ""
    """Id of the session of the page by which it asks; empty: it shows the key itself."""

    @property
    def name(self) -> str:
        """Owner of what it makes, in records and logs: id of the key, or name of the user."""
        return self.user or self.key

    @property
    def may(self) -> frozenset[Action]:
        return MAY[self.role] & self.scopes


class Verdict(StrEnum):
    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    """Not allowed for any object."""
    UNKNOWN = "unknown"
    """The object is another tenant's: it looks like one that does not exist."""


def authorize(principal: Principal | None, action: Action, tenant: str | None = None) -> Verdict:
    """Decide whether a principal may act. `tenant`: of the object; None: it does not exist yet, or is looked up in the
    principal's tenant. `principal` None: no key."""
    if action is Action.FREE:
        return Verdict.ALLOWED
    if principal is None or (action is not Action.ABOUT and action not in principal.may):
        return Verdict.FORBIDDEN
    own = tenant is None or tenant == principal.tenant
    return Verdict.ALLOWED if own or action in EVERYWHERE.get(principal.role, ()) else Verdict.UNKNOWN


def outranks(principal: Principal, role: Role, scopes: Collection[Action]) -> bool:
    """Return whether a key of this role and these scopes allows no more than the principal may: no one grants more than
    they have."""
    return MAY[role] & frozenset(scopes) <= principal.may
