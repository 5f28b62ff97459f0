"""Reads a user's name and groups from the claims of an OpenID provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentinker.shared.security.key_text import KEY_ID

MAX_GROUPS = 2000
"""Groups of one user that are looked at."""
MAX_NAME = 200


def claim_of(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path with dots; None if it is missing."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def user_of(claims: Mapping[str, Any], name: str) -> str:
    """Return the name of a user, which is never the id of a key. `name`: of the claim."""
    named = claim_of(claims, name)
    unverified = name == "email" and claims.get("email_verified", True) not in (True, "true")
    usable = isinstance(named, str) and named.strip() and not unverified
    text = printable(str(named if usable else claims["sub"]).strip())[:MAX_NAME]
    return f"user:{text}" if KEY_ID.fullmatch(text) else text


def groups_of(claims: Mapping[str, Any], name: str) -> list[str]:
    found = claim_of(claims, name)
    listed = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return [group for group in listed if isinstance(group, str) and group][:MAX_GROUPS]


def printable(text: str) -> str:
    """Replace each character that is not printable with a mark."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)
