"""Identifies the person behind a session of the page: the holder of the API key that it was made with, or a user of the
identity provider.

    token in the cookie --Redis--> Session --its key's record, or the roles of its groups--> Identity

The rights of a session are looked up each time and never stored: they end with its key, and with a group's role in the
settings. Lookups are cached for CACHE_S, as those of keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import SCOPES, Principal
from opentinker.shared.security.key_text import digest_of
from opentinker.shared.state.keys import Key, KeyStore
from opentinker.shared.state.sessions import Session, SessionStore, session_id

CACHE_S = 0.4
MAX_CACHED = 10_000
ENDED = "this session has ended; sign in again"


class NotIdentified(Exception):
    """A key or a session is not valid. `str(error)`: why, to be told."""


@dataclass(frozen=True, slots=True)
class Identity:
    principal: Principal
    digest: str
    """Digest of the session's token."""
    expires: float
    """Unix time at which the session ends unless it is used again."""

    def state(self, now: float) -> str:
        """live | expired"""
        return "live" if now < self.expires else "expired"

    def fits(self, digest: str, now: float) -> bool:
        """Return whether the token belongs to this session."""
        return digest == self.digest and now < self.expires


class Sessions:
    """The sessions of the page, as who they stand for."""

    def __init__(self, ctx: Context) -> None:
        self._settings = ctx.settings
        self.store, self._keys = SessionStore(ctx.store.redis), KeyStore(ctx.store.redis)
        self._cache: dict[str, tuple[Identity, float]] = {}
        """By digest of the token: whom it stood for, and when."""

    def is_known(self, token: str, now: float) -> bool:
        """Return whether the token was valid the last time that it was looked up."""
        found, _ = self._cache.get(digest_of(token), (None, 0.0))
        return found is not None and found.state(now) == "live"

    async def identify(self, token: str) -> Identity:
        """Return the identity behind this token. Raises NotIdentified."""
        id, digest, now, at = session_id(token), digest_of(token), time.time(), time.monotonic()
        if id is None:
            raise NotIdentified(ENDED)
        found, seen = self._cache.get(digest, (None, 0.0))
        if found is None or at - seen > CACHE_S:
            self._cache.pop(digest, None)
            session = await self.store.find(id)
            if session is None or not session.fits(digest):
                raise NotIdentified(ENDED)
            found = await self._identity(session, now)
            await self.store.note_use(session, now)
            while len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[digest] = (found, at)
        if found.state(now) != "live":
            raise NotIdentified(ENDED)
        return found

    async def several(self, ids: Iterable[str]) -> dict[str, Identity]:
        """Return the sessions among these that have not ended, by id."""
        now, found = time.time(), await self.store.several(ids)
        keys = await self._keys.several({session.key for session in found.values() if session.key})
        known: dict[str, Identity] = {}
        for id, session in found.items():
            try:
                known[id] = self._judged(session, keys.get(session.key), now)
            except NotIdentified:
                continue
        return known

    async def end(self, session: Session) -> None:
        """End a session. Its requests are cut off within a second."""
        await self.store.end(session)
        self._cache.pop(session.digest, None)

    async def end_of(self, token: str) -> None:
        """End the session of this token, if it has one: its browser gets another."""
        id = session_id(token)
        session = await self.store.find(id) if id else None
        if session is not None and session.fits(digest_of(token)):
            await self.end(session)

    async def _identity(self, session: Session, now: float) -> Identity:
        return self._judged(session, await self._keys.find(session.key) if session.key else None, now)

    def _judged(self, session: Session, key: Key | None, now: float) -> Identity:
        """Raises NotIdentified. `key`: the one that it was made with."""
        ends = session.ends(self._settings.session_idle_s)
        if now >= ends:
            raise NotIdentified(ENDED)
        if not session.key:
            granted = self._settings.role_of(session.groups)
            if session.issuer != self._settings.oidc_issuer or granted is None or granted[0] != session.tenant:
                raise NotIdentified("the groups of this session have no role here any more; sign in again")
            principal = Principal(*granted, "", SCOPES, user=session.user, session=session.id)
            return Identity(principal, session.digest, ends)
        if key is None or key.state(now) != "live" or not key.fits(session.secret, now):
            raise NotIdentified("the API key of this session is not valid any more; sign in with another one")
        ends = min(ends, key.expires or ends, ends if key.digest == session.secret else key.old_until)
        return Identity(replace(key.principal, session=session.id), session.digest, ends)
