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
    """The key that signs the webhooks of a tenant."""

    secret: str


class Keys(TypedDict):
    """Oldest first."""

    keys: list[Key]


class LoginProvider(TypedDict):
    """The identity provider where people sign in without a key."""

    name: str
    address: str
    """To be opened by the browser, which comes back to the page."""


class Login(TypedDict):
    """The ways to sign in to the page, and the session of the browser that asks."""

    auth: Literal["on", "off"]
    """Off: the server requires no key."""
    csrf: str | None
    """CSRF token, which requests of the session that change something send in X-CSRF-Token; null: no session."""
    expires: float | None
    """Time at which the session ends unless it is used again."""
    provider: LoginProvider | None
    """Null: only keys are accepted."""
    problem: str | None
    """Why this browser's last sign-in at the provider has failed; reported once."""


class Session(TypedDict):
    """A session of the page."""

    id: str
    tenant: str
    role: str
    key: str | None
    """Id of the API key that it was made with."""
    user: str | None
    """Name of a user who signed in without a key."""
    created: float
    last_used: float
    expires: float
    """Time at which it ends unless it is used again."""
    own: bool
    """The session by which the request was sent."""


class Sessions(TypedDict):
    """Those that end first come first."""

    sessions: list[Session]


class SignedIn(TypedDict):
    """A session that was made; its cookie is in the same answer."""

    csrf: str
    """CSRF token, which its requests that change something send in X-CSRF-Token."""
    expires: float
    """Time at which it ends unless it is used again."""


class SignedOut(TypedDict):
    """The session has ended."""

    session: str
    """Its id."""


class WhoAmI(TypedDict):
    """Identity of the key or user in the request."""

    auth: Literal["on", "off"]
    """Off: the server requires no key."""
    tenant: str
    role: str
    scopes: list[str]
    key: str | None
    """Its id."""
    user: str | None
    """Name of a user who signed in without a key."""
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
