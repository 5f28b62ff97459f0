"""Keys of the API and their tenants."""

from typing import Literal, TypedDict


class Key(TypedDict):
    """An API key, without its secret."""

    id: str
    tenant: str
    role: str
    scopes: list[str]
    name: str
    state: str
    """live, expired or revoked."""
    created: float
    created_by: str
    expires: float | None
    jobs: list[str]
    """All that a share link shows; empty for ordinary keys."""
    last_used: float | None
    previous_valid_until: float | None
    """End of validity of the previous secret, after a rotation."""


class MadeKey(Key):
    """The only answer that has the secret."""

    key: str


class Share(MadeKey):
    """A link that shows jobs."""

    address: str
    """To be appended to the server's URL. Whoever has it sees the jobs."""


class WebhookSecret(TypedDict):
    """What the webhooks of a tenant are signed with."""

    secret: str


class Keys(TypedDict):
    """Oldest first."""

    keys: list[Key]


class WhoAmI(TypedDict):
    """Identity of the key in the request."""

    auth: Literal["on", "off"]
    """Off: the server requires no key."""
    tenant: str
    role: str
    scopes: list[str]
    key: str | None
    """Its id."""
    name: str
    expires: float | None
    jobs: list[str]
    """All that a share link shows; empty for ordinary keys."""
    files: str
    """Equal to the asker's own `shared.paths.file_system()` if both see the same files by the same paths."""


class Tenant(TypedDict):
    """One that has had a key."""

    name: str
    since: float


class Tenants(TypedDict):
    """All of them."""

    tenants: list[Tenant]
