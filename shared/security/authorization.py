"""Who may do what: roles, actions, and the one function that decides, `authorize`. Pure: nothing is asked or changed.

    a key  --its record-->  Principal        a route  --its table row-->  Action        an object  -->  its tenant

A tenant's people see and change what is the tenant's. An operator is the server's own: an admin of its tenant who also
sees workers and queues, and the keys of all tenants, and frees workers of the jobs that hold them. Nobody, operators
neither, sees another tenant's jobs: whoever has to, makes a key there, which leaves a trace.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_TENANT = "default"
"""Of the first key of all."""


class Action(StrEnum):
    """What a route stands for. Those after ABOUT are also the scopes that a key may be confined to."""

    FREE = "free"
    """Asks nobody who it is."""
    ABOUT = "about"
    """What every key may: ask what routes there are, and who it is."""
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


SCOPES = frozenset(Action) - {Action.FREE, Action.ABOUT}

_VIEWER = {Action.JOBS_READ, Action.CHECKPOINTS_READ, Action.ENVIRONMENTS_READ}
_MEMBER = _VIEWER | {
    *(
        Action.JOBS_WRITE,
        Action.CHECKPOINTS_WRITE,
        Action.INFERENCE_USE,
        Action.ENVIRONMENTS_WRITE,
        Action.ENVIRONMENTS_SERVE,
    ),
}
_ADMIN = _MEMBER | {Action.KEYS_READ, Action.KEYS_WRITE}
MAY: dict[Role, frozenset[Action]] = {
    Role.VIEWER: frozenset(_VIEWER),
    Role.MEMBER: frozenset(_MEMBER),
    Role.ADMIN: frozenset(_ADMIN),
    Role.OPERATOR: frozenset(_ADMIN | {Action.SERVER_READ, Action.SERVER_WRITE}),
}
"""What keys of a role may, unless their scopes say less; each role may all that those before it may."""
EVERYWHERE: dict[Role, frozenset[Action]] = {Role.OPERATOR: frozenset({Action.KEYS_READ, Action.KEYS_WRITE})}
"""What a role may with objects of every tenant."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    tenant: str
    role: Role
    key: str
    """Id of the key; empty on a server that asks for none."""
    scopes: frozenset[Action]
    """The key's; what it may is what both its role and these allow."""

    @property
    def may(self) -> frozenset[Action]:
        return MAY[self.role] & self.scopes


class Verdict(StrEnum):
    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    """It may not do such a thing, whatever the object."""
    UNKNOWN = "unknown"
    """The object is another tenant's: it looks like one that does not exist."""


def authorize(principal: Principal | None, action: Action, tenant: str | None = None) -> Verdict:
    """`tenant`: of the object; None: there is none yet, it is made or looked for in the principal's own tenant.
    `principal` None: somebody without a key."""
    if action is Action.FREE:
        return Verdict.ALLOWED
    if principal is None or (action is not Action.ABOUT and action not in principal.may):
        return Verdict.FORBIDDEN
    own = tenant is None or tenant == principal.tenant
    return Verdict.ALLOWED if own or action in EVERYWHERE.get(principal.role, ()) else Verdict.UNKNOWN


def outranks(principal: Principal, role: Role, scopes: Collection[Action]) -> bool:
    """Whether a key of this role and these scopes may do nothing that the principal may not: nobody gives more than
    they have."""
    return MAY[role] & frozenset(scopes) <= principal.may
