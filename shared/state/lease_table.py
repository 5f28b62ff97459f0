"""Workers and leases in Redis: who is there, who works for whom, on whose account; and which scheduler may say so.

Keys (`{worker}` is a worker slot):
    worker:{worker}     Heartbeat; removed by the worker itself when it stops, or by the scheduler that leads when the
                        beat's number stands still (liveness.py): no clock of the Redis server decides who lives
    workers             set of slots whose worker beats, or did so until a moment ago
    leases              hash: slot -> Lease, what its worker should do
    leases:held         hash: slot -> tenant, job, GPUs, and the time up to which they are counted
    spent:*             seconds held, and times GPUs, are counted there (usage.py)
    leader              the scheduler that leads; gone when it is not renewed for its time by the clock of the Redis
                        server, or by that of another scheduler
    leader:epoch        counts leaders: what an earlier one still wants to write is refused

Times that are counted are the Redis server's; a step of its clock counts for CHARGED_AT_MOST_S.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec

from opentinker.shared.state.redis_script import LED_BY_ANOTHER, UNFENCED, LeadersScript, Script
from opentinker.shared.state.usage import DAY_S, DAYS
from opentinker.shared.types import codec
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import Conflict, Fenced
from opentinker.shared.types.workers import Heartbeat, WorkerInfo

CHARGED_AT_MOST_S = 10.0
"""Seconds charged per count: the leading scheduler counts every two seconds. A longer interval, because no scheduler
led or the clock jumped, is free beyond this."""
CHARGE = f"""
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local function charge(slot)
  local text = redis.call('HGET', 'leases:held', slot)
  if not text then return end
  local held = cjson.decode(text)
  local spent = math.min(math.max(0, now - held.at), {CHARGED_AT_MOST_S})
  local day = 'spent:' .. held.tenant .. ':' .. math.floor(now / {DAY_S})
  for _, key in ipairs({{day, 'spent:job:' .. held.job}}) do
    redis.call('HINCRBYFLOAT', key, 'worker_s', string.format('%.6f', spent))
    if held.gpus > 0 then redis.call('HINCRBYFLOAT', key, 'gpu_s', string.format('%.6f', spent * held.gpus)) end
  end
  redis.call('EXPIRE', day, {DAYS * DAY_S})
  held.at = now
  redis.call('HSET', 'leases:held', slot, cjson.encode(held))
end
local function grant(slot, lease, account)
  local held = cjson.decode(account)
  charge(slot)
  held.at = now
  redis.call('HSET', 'leases', slot, lease)
  redis.call('HSET', 'leases:held', slot, cjson.encode(held))
end
local function taken(slot, job)
  local before = redis.call('HGET', 'leases', slot)
  return before and cjson.decode(before).job ~= job
end
"""
"""Common beginning of scripts that count what leases have held."""

# KEYS leases, leases:held. ARGV: leader's epoch, slot, job, lease, account
_GRANT = """
if taken(ARGV[2], ARGV[3]) then return 'taken' end
grant(ARGV[2], ARGV[4], ARGV[5])
"""

# KEYS leases, leases:held. ARGV: leader's epoch, slot
_REVOKE = """
charge(ARGV[2])
redis.call('HDEL', 'leases:held', ARGV[2])
redis.call('HDEL', 'leases', ARGV[2])
"""

# KEYS leases. ARGV: leader's epoch, slot, job, incarnation, lease
_LEAVE_LEASE = """
local before = redis.call('HGET', 'leases', ARGV[2])
if not before then return 'gone' end
local lease = cjson.decode(before)
if lease.job ~= ARGV[3] or lease.incarnation ~= ARGV[4] then return 'gone' end
redis.call('HSET', 'leases', ARGV[2], ARGV[5])
"""

# KEYS leases, leases:held
_CHARGE_ALL = CHARGE + "for _, slot in ipairs(redis.call('HKEYS', 'leases:held')) do charge(slot) end"

# KEYS leader, leader:epoch. ARGV: slot, incarnation, milliseconds, the leader's last announcement if it has not changed
# for its TTL ('' = it has changed, or unknown). A slot's new process replaces the old one. Returns the epoch (0:
# another one leads), and the leader's current announcement.
_LEAD = """
local before = redis.call('GET', KEYS[1])
local function say(epoch, number)
  local said = cjson.encode({slot = ARGV[1], incarnation = ARGV[2], epoch = epoch, number = number})
  redis.call('SET', KEYS[1], said, 'PX', ARGV[3])
  return {epoch, said}
end
if before and before ~= ARGV[4] then
  local leader = cjson.decode(before)
  if leader.slot ~= ARGV[1] then return {0, before} end
  if leader.incarnation == ARGV[2] then return say(leader.epoch, (leader.number or 0) + 1) end
end
return say(redis.call('INCR', KEYS[2]), 0)
"""

# KEYS leader. ARGV: incarnation
_RESIGN = """
local before = redis.call('GET', KEYS[1])
if before and cjson.decode(before).incarnation == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


# KEYS worker, workers. ARGV: id, heartbeat
_BEAT = """
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
"""

# KEYS worker, workers. ARGV: leader's epoch, id, incarnation, number of its last beat
_LOSE = """
local text = redis.call('GET', KEYS[1])
if text then
  local beat = cjson.decode(text)
  if beat.incarnation ~= ARGV[3] or tonumber(beat.number or 0) ~= tonumber(ARGV[4]) then return 'beats' end
  redis.call('DEL', KEYS[1])
end
redis.call('SREM', KEYS[2], ARGV[2])
return 'ok'
"""

# KEYS worker. ARGV: incarnation
_LEAVE = """
local info = redis.call('GET', KEYS[1])
if info and cjson.decode(info).incarnation == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS workers. A member whose key is gone is taken out in the same act: a beat is never overlooked.
_WORKERS = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local info = redis.call('GET', 'worker:' .. id)
  if info then found[#found + 1] = info else redis.call('SREM', KEYS[1], id) end
end
return found
"""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """On whose account a lease is."""

    tenant: str
    job: str
    gpus: int = 0


class LeaseTable:
    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self._numbers = itertools.count(1)
        self._rival = ("", 0.0)
        """Last announcement of the leading scheduler, and when we first saw it; monotonic."""
        self._looked_at = float("-inf")
        """At who leads."""
        self._beat = Script(redis, _BEAT)
        self._lose = LeadersScript(redis, _LOSE)
        self._leave = Script(redis, _LEAVE)
        self._workers = Script(redis, _WORKERS)
        self._grant = LeadersScript(redis, CHARGE + _GRANT)
        self._revoke = LeadersScript(redis, CHARGE + _REVOKE)
        self._leave_lease = LeadersScript(redis, _LEAVE_LEASE)
        self._charge_all = Script(redis, _CHARGE_ALL)
        self._lead = Script(redis, _LEAD)
        self._resign = Script(redis, _RESIGN)

    async def beat(self, info: WorkerInfo, ttl_s: float) -> None:
        """Send a heartbeat. `ttl_s`: the worker counts as dead after this time without another one."""
        beat = Heartbeat(**msgspec.structs.asdict(info), number=next(self._numbers), ttl_s=ttl_s)
        await self._beat(keys=[f"worker:{info.id}", "workers"], args=[info.id, codec.to_json(beat)])

    async def leave(self, info: WorkerInfo) -> None:
        """Remove this incarnation's registration only: the slot's next process may have registered already."""
        await self._leave(keys=[f"worker:{info.id}"], args=[info.incarnation])

    async def remove_dead(self, silent: Heartbeat, *, leader: int = UNFENCED) -> bool:
        """The worker is gone for everybody, unless it has beaten since: then False. Raises Fenced."""
        keys, args = [f"worker:{silent.id}", "workers"], [silent.id, silent.incarnation, silent.number]
        return bool(await self._lose(leader=leader, keys=keys, args=args) == "ok")

    async def workers(self) -> list[WorkerInfo]:
        """Return workers with a heartbeat, by id."""
        values = await self._workers(keys=["workers"])
        return sorted((codec.from_json(WorkerInfo, value) for value in values), key=lambda worker: worker.id)

    async def beats(self) -> list[Heartbeat]:
        """The last one of each of them, by id."""
        values = await self._workers(keys=["workers"])
        return sorted((codec.from_json(Heartbeat, value) for value in values), key=lambda beat: beat.id)

    async def lives(self, worker: str, incarnation: str) -> bool:
        """Return whether this incarnation of the worker has a heartbeat."""
        value = await self.redis.get(f"worker:{worker}")
        return value is not None and codec.from_json(WorkerInfo, value).incarnation == incarnation

    # --- leases --------------------------------------------------------------------------------------------------

    async def lease(self, worker: str) -> Lease | None:
        value = await self.redis.hget("leases", worker)
        return None if value is None else codec.from_json(Lease, value)

    async def leases(self) -> list[Lease]:
        return [codec.from_json(Lease, value) for value in await self.redis.hvals("leases")]

    async def grant(self, lease: Lease, *, tenant: str = "", gpus: int = 0, leader: int = UNFENCED) -> None:
        """Grant a lease, or change one that its job holds. Raises Fenced if another scheduler leads now, Conflict if
        another job holds the worker."""
        slot, text, account = granted(lease, tenant, gpus)
        if await self._grant(leader=leader, keys=["leases", "leases:held"], args=[slot, lease.job, text, account]):
            raise held_by_another(slot)

    async def start_drain(self, leaving: Lease, *, leader: int = UNFENCED) -> None:
        """The same lease, with a time at which it ends. Raises Fenced, and Conflict if it is gone."""
        args = [leaving.worker, leaving.job, leaving.incarnation, codec.to_json(leaving)]
        if await self._leave_lease(leader=leader, keys=["leases"], args=args):
            raise Conflict(f"{leaving.worker} does not work for job {leaving.job} any more")

    async def revoke(self, worker: str, *, leader: int = UNFENCED) -> None:
        """Raises Fenced."""
        await self._revoke(leader=leader, keys=["leases", "leases:held"], args=[worker])

    # --- what is held is counted ---------------------------------------------------------------------------------

    async def charge(self) -> None:
        """Count, among what jobs have spent, what all leases have held until now; leases that end are counted then."""
        await self._charge_all(keys=["leases", "leases:held"])

    # --- who leads -----------------------------------------------------------------------------------------------

    async def lead(self, slot: str, incarnation: str, ttl_s: float) -> int | None:
        """Acquire or keep leadership; return its epoch, or None if another scheduler leads. A leader without a new
        announcement for `ttl_s` loses leadership, by our clock and not that of Redis: call this at least twice as
        often."""
        now = time.monotonic()
        said, since = self._rival
        if now - self._looked_at > ttl_s / 2:
            since = now  # announcements in between may have been missed
        silent = said if now - since >= ttl_s else ""
        epoch, says = await self._lead(
            keys=["leader", "leader:epoch"], args=[slot, incarnation, int(ttl_s * 1000), silent]
        )
        self._rival, self._looked_at = (says, since if says == said else now), now
        return int(epoch) or None

    async def require_leadership(self, leader: int) -> None:
        """Raises Fenced if another scheduler leads. Before what no script writes."""
        if leader not in (UNFENCED, int(await self.redis.get("leader:epoch") or 0)):
            raise Fenced(LED_BY_ANOTHER)

    async def resign(self, incarnation: str) -> None:
        """Release leadership, so that the next scheduler can lead immediately."""
        await self._resign(keys=["leader"], args=[incarnation])


def granted(lease: Lease, tenant: str, gpus: int) -> tuple[str, bytes, bytes]:
    """Slot, lease and account, as scripts take them."""
    account = Account(tenant=tenant, job=lease.job, gpus=gpus)
    return lease.worker, codec.to_json(lease), codec.to_json(account)


def held_by_another(slot: str) -> Conflict:
    return Conflict(f"another job holds one of {slot}")
