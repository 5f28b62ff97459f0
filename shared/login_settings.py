"""The operator's settings for signing in to the page, part of `Settings` (config.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from opentinker.shared.security.authorization import DEFAULT_TENANT, MAY, TENANT, Role
from opentinker.shared.security.egress import networks
from opentinker.shared.security.secrets import CLIENT_SECRET, read_secret
from opentinker.shared.types.errors import SpecError

DAY_S = 86400.0
EVERYONE = "*"
"""Stands for a group of everyone whom the provider lets in."""
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""
_CLAIM = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
_SCOPE = Annotated[str, Field(pattern=r"^[!#-\[\]-~]{1,100}$")]
_SECRET = re.compile(r"[!-~]{8,512}")


class GroupRole(BaseModel):
    """Tenant and role of a group of the provider."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tenant: Annotated[str, Field(pattern=f"^{TENANT.pattern}$")]
    """Tenant whose jobs its users see and make."""
    role: Role
    """viewer, member, admin; operator only in tenant default."""

    @model_validator(mode="after")
    def _operators_have_one_tenant(self) -> Self:
        if self.role is Role.OPERATOR and self.tenant != DEFAULT_TENANT:
            raise ValueError(f"operators belong to tenant {DEFAULT_TENANT}")
        return self


class LoginSettings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    session_idle_s: Annotated[float, Field(ge=60, le=30 * DAY_S)] = 8 * 3600.0
    """A session of the page ends after this time without a request; an open page asks every few seconds."""
    session_max_s: Annotated[float, Field(ge=60, le=90 * DAY_S)] = DAY_S
    """A session of the page ends after this time in any case, and its user signs in again."""
    http_proxies: Annotated[list[str], Field(max_length=64)] = []
    """Proxies in front of the API, as addresses or networks (`10.0.0.0/8`), in an environment variable with commas. A
    request from one of them counts for the client that X-Forwarded-For names, in rates and in the audit log. Name only
    proxies that set this header or add to it."""
    oidc_issuer: Annotated[str, Field(max_length=500)] = ""
    """Issuer of an OpenID provider, `https://...` exactly as it names itself: people sign in to the page there, without
    a key. Needs public_url, oidc_client_id, a client secret and oidc_groups. Empty: by key alone. See docs/login.md."""
    oidc_client_id: Annotated[str, Field(pattern=r"^[ -~]{0,300}$")] = ""
    """Name of this server at the provider."""
    oidc_client_secret_file: Path | None = None
    """A file with the client secret that the provider gave; else OPENTINKER_OIDC_CLIENT_SECRET of the scheduler's
    environment holds it."""
    oidc_name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{0,60}$")] = ""
    """The provider on the button: Sign in with NAME. Default: host of the issuer."""
    oidc_scopes: Annotated[list[_SCOPE], Field(max_length=20)] = ["openid", "profile", "email"]
    """Scopes to request from the provider; some need another for groups. In an environment variable, with commas."""
    oidc_user_claim: _CLAIM = "email"
    """Claim of the id token that names a user in records and logs; `sub` stands in if it is missing, or an e-mail
    address that the provider calls unverified."""
    oidc_groups_claim: _CLAIM = "groups"
    """Claim of the id token, else of the provider's answer about the user, that lists groups: its name, or a path with
    dots (`realm_access.roles`)."""
    oidc_groups: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=300)], GroupRole], Field(max_length=500)
    ] = {}
    """By group, tenant and role. In a file `[oidc_groups."ml-team"]` with `tenant = "ml"`, `role = "member"`; in an
    environment variable the same as JSON. The first group in this order that a user is in decides the tenant, and the
    highest role of the user's groups there counts. `*` is everyone whom the provider lets in."""
    oidc_contact: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{0,200}$")] = ""
    """Contact for users without a role, e.g. an e-mail address. Default: the operator of this server."""

    @field_validator("http_proxies", mode="before")
    @classmethod
    def _proxies(cls, given: object) -> object:
        if isinstance(given, list) and not all(isinstance(part, str) for part in given):
            return given
        return networks(given) if isinstance(given, str | list) else given

    @field_validator("oidc_issuer")
    @classmethod
    def _is_an_issuer(cls, url: str) -> str:
        if url and not is_provider_url(url, url):
            raise ValueError("must be https://HOST[:PORT][/PATH], without a query")
        return url

    @field_validator("oidc_scopes", mode="before")
    @classmethod
    def _scopes(cls, given: object) -> object:
        return split_commas(given)

    @field_validator("oidc_scopes")
    @classmethod
    def _identify(cls, scopes: list[str]) -> list[str]:
        if "openid" not in scopes:
            raise ValueError("must have openid: without it a provider sends no id token")
        return scopes

    @field_validator("oidc_groups", mode="before")
    @classmethod
    def _groups(cls, given: object) -> object:
        return from_json(given, example='{"ml-team": {"tenant": "ml", "role": "member"}}')

    @model_validator(mode="after")
    def _login_is_whole(self) -> Self:
        if not self.oidc_issuer:
            own = [name for name in LoginSettings.model_fields if name.startswith("oidc_")]
            if unused := [name for name in own if getattr(self, name) != LoginSettings.model_fields[name].default]:
                raise ValueError(f"{unused[0]} is not used: oidc_issuer names no provider")
            return self
        needed = {"oidc_client_id": "this server's name there", "oidc_groups": "without it no user has a role"}
        if missing := [f"{name} ({why})" for name, why in needed.items() if not getattr(self, name)]:
            raise ValueError(f"oidc_issuer needs {', '.join(missing)}")
        public = str(getattr(self, "public_url", ""))
        if not is_provider_url(public, public):
            raise ValueError("oidc_issuer needs public_url = https://...: the provider sends people back there")
        if not getattr(self, "auth", True):
            raise ValueError("oidc_issuer is not used: auth = false")
        return self

    def client_secret(self) -> str:
        """Raises SpecError."""
        path = self.oidc_client_secret_file
        secret = os.environ.get(CLIENT_SECRET, "") if path is None else read_secret(path, "oidc_client_secret_file")
        if not _SECRET.fullmatch(secret):
            where = f"or {CLIENT_SECRET} of the scheduler's environment: the client secret"
            problem = f"must name a file with the client secret, 8 to 512 printable characters, {where}"
            raise SpecError.of("oidc_client_secret_file", None if path is None else str(path), problem)
        return secret

    def role_of(self, groups: Collection[str]) -> tuple[str, Role] | None:
        """Return tenant and role of a user in these groups; None: no group has a role."""
        own = [grant for group, grant in self.oidc_groups.items() if group == EVERYONE or group in groups]
        if not own:
            return None
        return own[0].tenant, max(
            (one.role for one in own if one.tenant == own[0].tenant), key=lambda role: len(MAY[role])
        )


def split_commas(given: Any) -> Any:
    """Return the parts of a text, as environment variables have lists; anything else as it is."""
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def from_json(given: object, example: str) -> object:
    """Return what a text in JSON says; anything else as it is. Raises ValueError."""
    try:
        return orjson.loads(given) if isinstance(given, str) else given
    except orjson.JSONDecodeError:
        raise ValueError(f"must be JSON, e.g. {example}") from None


def is_provider_url(url: str, issuer: str) -> bool:
    """Return whether a provider of this issuer may have such an address: https, but on loopback."""
    try:
        parts, at = urlsplit(url), urlsplit(issuer)
    except ValueError:
        return False
    plain = parts.scheme == "http" and {parts.hostname, at.hostname} <= {*LOOPBACK_HOSTS}
    whole = bool(parts.hostname) and not parts.username and not parts.query and not parts.fragment
    return whole and (parts.scheme == "https" or plain) and not re.search(r"[\s\\]", url)
