"""Sessions of the Tinker API's clients in Redis, their samplers, and the end of both.

Redis keys:
    tinker:session:{id}         the TinkerSession as JSON
    tinker:beat:{id}            exists while the session's client sends heartbeats
    tinker:beats                sorted set of session ids by the Unix time of their last heartbeat; of those that their
                                clients have finished, LEFT_S before that
    tinker:closing              sorted set of ids of sessions that are being removed, by the Unix time of the last try
    tinker:finished:{id}        how the session's client says that it ended, as JSON
    tinker:in:{id}              set of ids of the session's samplers
    tinker:trained:{id}         set of ids of the session's models
    tinker:sessions:{tenant}    sorted set of session ids by creation time
    tinker:sampler:{id}         the Sampler as JSON
    tinker:samplers:{tenant}    sorted set of the tenant's sampler ids by their last use
    tinker:sampling:{model}     sorted set of ids of samplers that hold weights of the model, by their last use
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from opentinker.shared.state.redis_script import Script
from opentinker.shared.state.tinker import held_bytes
from opentinker.shared.state.tinker.held_bytes import HELD_KEYS
from opentinker.shared.state.tinker.requests import T, TinkerRequests
from opentinker.shared.types import codec
from opentinker.shared.types.errors import NotFound, OpenTinkerError
from opentinker.shared.types.tinker import Sampler, TinkerCheckpoint, TinkerModel, TinkerSession

Owned = TypeVar("Owned", TinkerSession, TinkerModel, Sampler, TinkerCheckpoint)

BEAT_S = 300
"""A session without heartbeats for this long counts as left by its client."""
SESSION_KEPT_S = 86400.0
"""A session without heartbeats for this long is removed, with its samplers and models."""
LEFT_S = 3600.0
"""A session without heartbeats for this long, or that its client has finished, makes room for new ones at a bound."""
MAX_SESSIONS, MAX_SAMPLERS = 1000, 10_000
"""Largest number for a tenant."""
SAMPLER_KEPT_S = 3600.0
"""A sampler without requests for this long makes room for new ones at the bound."""


# KEYS session, beat, beats, sessions. ARGV: id, record, created, now, BEAT_S, MAX_SESSIONS
_OPEN_SESSION = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[6]) then return 0 end
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
end
redis.call('SET', KEYS[2], '1', 'EX', ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return 1
"""

# KEYS session, beat, beats, closing, finished. ARGV: id, now, BEAT_S
_BEAT = """
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('EXISTS', KEYS[5]) == 1 then return 0 end
if redis.call('ZSCORE', KEYS[4], ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], '1', 'EX', ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
return 1
"""

# KEYS beat, beats, closing, sessions, trained, live. ARGV: id, time of a heartbeat that keeps it, now. Returns 1 more
# than the models that count no longer; 0: the session stays
_LEAVE_SESSION = """
local beat = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not beat or tonumber(beat) > tonumber(ARGV[2]) or redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
local removed = 1
for _, model in ipairs(redis.call('SMEMBERS', KEYS[5])) do removed = removed + redis.call('SREM', KEYS[6], model) end
return removed
"""

# KEYS sampler, in, model, sampling, samplers, session, closing. ARGV: id, record, seq (empty: it is no newest one of a
# model), time, 1 if it holds weights of a model, id of the session
_ADD_SAMPLER = """
if redis.call('EXISTS', KEYS[6]) == 0 or redis.call('ZSCORE', KEYS[7], ARGV[6]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[5], ARGV[4], ARGV[1])
if ARGV[3] ~= '' and tonumber(redis.call('HGET', KEYS[3], 'sampler_seq') or -1) <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], 'sampler', ARGV[1], 'sampler_seq', ARGV[3])
end
if ARGV[5] == '1' then redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1]) end
return 1
"""


class TooManyRecords(OpenTinkerError):
    """A tenant has as many sessions, samplers or models as it may."""


class TinkerSessions(TinkerRequests):
    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        self._open_session = Script(redis, _OPEN_SESSION)
        self._beat, self._leave_session = Script(redis, _BEAT), Script(redis, _LEAVE_SESSION)
        self._add_sampler = Script(redis, _ADD_SAMPLER)

    # --- sessions -----------------------------------------------------------------------------------------------

    async def open_session(self, session: TinkerSession) -> None:
        """Idempotent. Raises TooManyRecords."""
        opened = await self._open_session(
            keys=[f"tinker:session:{session.id}", f"tinker:beat:{session.id}", "tinker:beats",
                  f"tinker:sessions:{session.tenant}"],
            args=[session.id, codec.to_json(session), session.created, time.time(), BEAT_S, MAX_SESSIONS],
        )  # fmt: skip
        if not opened:
            raise TooManyRecords(
                f"tenant {session.tenant} has {MAX_SESSIONS} sessions whose clients send heartbeats, or did within the "
                f"last {LEFT_S / 60:.0f} minutes; end clients that are not used"
            )

    async def session(self, tenant: str, id: str) -> TinkerSession:
        """Raises NotFound, for a session of another tenant too."""
        return self._own(await self._read(TinkerSession, f"tinker:session:{id}"), tenant, f"session {id}")

    async def sessions(self, tenant: str, ids: Sequence[str]) -> list[TinkerSession]:
        """Return those of these sessions that there are; other tenants' are left out."""
        return [session for session in await self._sessions(ids) if session.tenant == tenant]

    async def has_session(self, id: str) -> bool:
        """Return whether the session of a model or sampler is there."""
        return bool(await self._redis.exists(f"tinker:session:{id.partition(':')[0]}"))

    async def beat(self, id: str) -> bool:
        """Note a heartbeat. Return False, and change nothing, for a session that has ended."""
        keys = [f"tinker:session:{id}", f"tinker:beat:{id}", "tinker:beats", "tinker:closing", f"tinker:finished:{id}"]
        return bool(await self._beat(keys=keys, args=[id, time.time(), BEAT_S]))

    async def finish(self, id: str, how: str) -> None:
        """Note how the client of a session ended, as JSON; the first report stands."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(f"tinker:finished:{id}", how, nx=True)
            pipe.delete(f"tinker:beat:{id}")
            pipe.zadd("tinker:beats", {id: time.time() - LEFT_S}, xx=True)
            await pipe.execute()

    async def finished(self, id: str) -> str:
        """Return how the client of a session ended, as JSON; empty: it has not reported an end."""
        return str(await self._redis.get(f"tinker:finished:{id}") or "")

    async def is_alive(self, id: str) -> bool:
        return bool(await self._redis.exists(f"tinker:beat:{id}"))

    async def drop_unread(self) -> None:
        """Forget large answers that were not read, of clients that send no heartbeats, where a tenant's bytes are half
        of what they may be: a client that was killed does not delay the next one."""
        names = [name async for name, _ in self._redis.zscan_iter(HELD_KEYS[2], match="tinker:answer:*", count=1000)]
        held, alive = await self._redis.hgetall(HELD_KEYS[1]), dict[str, bool]()
        for start in range(0, len(names), 500):
            some = names[start : start + 500]
            for name, entry in zip(some, await self._redis.hmget(HELD_KEYS[0], some), strict=True):
                tenant, session = (entry or "").partition(" ")[2], name.split(":")[2]
                if 2 * int(held.get(tenant, 0)) < held_bytes.MAX_HELD_BYTES:
                    continue
                if session not in alive:
                    alive[session] = await self.is_alive(session)
                if not alive[session]:
                    await self._redis.delete(name)
                    await self.release(name)

    async def session_ids(self, tenant: str, offset: int, limit: int) -> list[str]:
        """Return ids of the tenant's sessions, newest first."""
        return list(await self._redis.zrange(f"tinker:sessions:{tenant}", offset, offset + limit - 1, desc=True))

    async def sessions_after(self, tenant: str, last: str, created: float, limit: int) -> list[TinkerSession]:
        """Return the tenant's sessions that follow this one, newest first; from the first if it is empty. `created`:
        its time, which says what follows it after it was removed."""
        key, start = f"tinker:sessions:{tenant}", 0
        if last:
            rank = await self._redis.zrevrank(key, last)
            start = int(await self._redis.zcount(key, f"({created}", "+inf") if rank is None else rank + 1)
        return await self._listed(TinkerSession, key, "tinker:session:", start, limit)

    async def models_in(self, session: str) -> list[str]:
        return sorted(await self._redis.smembers(f"tinker:trained:{session}"))

    async def sessions_left(self, before: float, limit: int = 1000) -> list[TinkerSession]:
        """Return sessions without a heartbeat since this Unix time, those left first."""
        ids = await self._redis.zrange("tinker:beats", "-inf", before, byscore=True, offset=0, num=limit)
        return await self._sessions(ids)

    async def leave_session(self, tenant: str, id: str, before: float) -> int:
        """Begin to remove a session: it takes no further heartbeats, models and samplers, and neither it nor its
        models count. Return 1 more than those that counted; 0, and change nothing, if it has had a heartbeat since this
        Unix time."""
        return int(await self._leave_session(
            keys=[f"tinker:beat:{id}", "tinker:beats", "tinker:closing", f"tinker:sessions:{tenant}",
                  f"tinker:trained:{id}", f"tinker:live:{tenant}"],
            args=[id, before, time.time()],
        ))  # fmt: skip

    async def make_room(self, tenant: str, *, models: bool) -> None:
        """Begin to remove the session of the tenant that was left first, at least LEFT_S ago or finished; with `models`
        as many as it takes until a model counts no longer."""
        ids, before = await self._redis.zrange(f"tinker:sessions:{tenant}", 0, -1), time.time() - LEFT_S
        beats = await self._redis.zmscore("tinker:beats", ids) if ids else []
        for _, id in sorted((beat, id) for beat, id in zip(beats, ids, strict=True) if beat is not None):
            if await self.leave_session(tenant, id, before) > int(models):
                return

    async def sessions_closing(self, before: float, limit: int = 100) -> list[TinkerSession]:
        """Return sessions that are being removed, and were not tried since this Unix time."""
        ids = await self._redis.zrange("tinker:closing", "-inf", f"({before}", byscore=True, offset=0, num=limit)
        return await self._sessions(ids)

    async def try_later(self, id: str, now: float) -> None:
        """Note that a session that is being removed was tried."""
        await self._redis.zadd("tinker:closing", {id: now}, xx=True)

    async def close_session(self, session: TinkerSession) -> None:
        """Remove a session and its samplers."""
        samplers = await self.samplers_in(session.id)
        for start in range(0, len(samplers), 500):
            await self._remove_samplers(session.tenant, samplers[start : start + 500])
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(*(f"tinker:{key}:{session.id}" for key in ("session", "beat", "finished", "trained", "in")))
            pipe.zrem("tinker:beats", session.id)
            pipe.zrem("tinker:closing", session.id)
            pipe.zrem(f"tinker:sessions:{session.tenant}", session.id)
            await pipe.execute()

    async def _sessions(self, ids: Sequence[str]) -> list[TinkerSession]:
        texts = await self._redis.mget([f"tinker:session:{id}" for id in ids]) if ids else []
        return [codec.from_json(TinkerSession, text) for text in texts if text]

    # --- samplers -----------------------------------------------------------------------------------------------

    async def add_sampler(self, sampler: Sampler) -> None:
        """Save it; one with this id is replaced. One of a model's weights without a name is its newest from now on,
        unless a later command has saved another. Raises NotFound if its session has ended."""
        number, session = sampler.version.rpartition("@")[2], sampler.session
        is_newest, model = bool(sampler.model and not sampler.path), sampler.model
        added = await self._add_sampler(
            keys=[f"tinker:sampler:{sampler.id}", f"tinker:in:{session}", f"tinker:model:{model}",
                  f"tinker:sampling:{model}", f"tinker:samplers:{sampler.tenant}", f"tinker:session:{session}",
                  "tinker:closing"],
            args=[sampler.id, codec.to_json(sampler), (number if number.isdigit() else "0") if is_newest else "",
                  time.time(), int(bool(model and not sampler.follows)), session],
        )  # fmt: skip
        if not added:
            raise NotFound(f"session {session} has ended")

    async def make_room_for_sampler(self, tenant: str) -> None:
        """Remove samplers that have been idle for long if the tenant has as many as it may. Raises TooManyRecords."""
        key = f"tinker:samplers:{tenant}"
        if await self._redis.zcard(key) < MAX_SAMPLERS:
            return
        idle = await self._redis.zrange(key, "-inf", time.time() - SAMPLER_KEPT_S, byscore=True, offset=0, num=100)
        if not idle:
            raise TooManyRecords(
                f"tenant {tenant} has {MAX_SAMPLERS} samplers, all of them used within the last "
                f"{SAMPLER_KEPT_S / 60:.0f} minutes; sample with those, or end clients that are not used"
            )
        await self._remove_samplers(tenant, idle)

    async def _remove_samplers(self, tenant: str, ids: Sequence[str]) -> None:
        texts = await self._redis.mget([f"tinker:sampler:{id}" for id in ids])
        async with self._redis.pipeline(transaction=False) as pipe:
            for id, text in zip(ids, texts, strict=True):
                pipe.delete(f"tinker:sampler:{id}")
                pipe.zrem(f"tinker:samplers:{tenant}", id)
                pipe.srem(f"tinker:in:{id.partition(':')[0]}", id)
                if text and (model := codec.from_json(Sampler, text).model):
                    pipe.zrem(f"tinker:sampling:{model}", id)
            await pipe.execute()

    async def used_sampler(self, sampler: Sampler, newest: Sampler) -> None:
        """Note that samples are drawn with it, and with its weights. `newest`: the sampler that holds them, which is
        another one if it follows the model's."""
        now = time.time()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(f"tinker:samplers:{sampler.tenant}", {sampler.id: now, newest.id: now}, xx=True)
            if sampler.model and not sampler.follows:
                pipe.zadd(f"tinker:sampling:{sampler.model}", {sampler.id: now})
            await pipe.execute()

    async def samplers_of(self, model: str) -> list[Sampler]:
        """Return those that hold weights of the model, the most recently used ones first, without those forgotten."""
        return await self._listed(Sampler, f"tinker:sampling:{model}", "tinker:sampler:")

    async def samplers_in(self, session: str) -> list[str]:
        return sorted(await self._redis.smembers(f"tinker:in:{session}"))

    async def forget_use(self, model: str, ids: Sequence[str]) -> None:
        if ids:
            await self._redis.zrem(f"tinker:sampling:{model}", *ids)

    async def newest_of(self, sampler: Sampler) -> Sampler:
        """Return the sampler with the model's newest weights, which one that follows them samples with."""
        if not sampler.follows:
            return sampler
        id = await self._redis.hget(f"tinker:model:{sampler.model}", "sampler")
        return (await self._read(Sampler, f"tinker:sampler:{id}") if id else None) or sampler

    async def sampler(self, tenant: str, id: str) -> Sampler:
        """Raises NotFound, for a sampler of another tenant too."""
        return self._own(await self._read(Sampler, f"tinker:sampler:{id}"), tenant, f"sampler {id}")

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _listed(self, kind: type[T], index: str, prefix: str, start: int = 0, limit: int = 0) -> list[T]:
        """Return what an index names, by descending score; all of it without a limit."""
        ids = await self._redis.zrange(index, start, start + limit - 1 if limit else -1, desc=True)
        texts = await self._redis.mget([prefix + id for id in ids]) if ids else []
        return [codec.from_json(kind, text) for text in texts if text]

    @staticmethod
    def _own(found: Owned | None, tenant: str, name: str) -> Owned:
        if found is None or found.tenant != tenant:
            raise NotFound(f"{name} does not exist")
        return found
