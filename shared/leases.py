"""Workers and leases in Redis: who is there, who works for whom, on whose account; and which scheduler may say so.

Keys (`{worker}` is a worker slot):
    worker:{worker}     WorkerInfo, expires when the worker stops beating
    workers             set of slots whose worker beats, or did so until a moment ago
    leases              hash: slot -> Lease, what its worker should do
    leases:held         hash: slot -> tenant, job, GPUs, and the time up to which they are counted
    spent:*             seconds held, and times GPUs, are counted there (usage.py)
    leader              the scheduler that leads; expires unless it is renewed
    leader:epoch        counts leaders: what an earlier one still wants to write is refused

Times are the Redis server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from opentinker.shared import codec
from opentinker.shared.errors import Conflict, Fenced
from opentinker.shared.script import Script
from opentinker.shared.types import Lease, WorkerInfo
from opentinker.shared.usage import DAY_S, DAYS

UNFENCED = -1
"""In the place of a leader's epoch: nobody leads."""
CHARGE = f"""
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local function charge(slot)
  local text = redis.call('HGET', 'leases:held', slot)
  if not text then return end
  local held = cjson.decode(text)
  local spent = math.max(0, now - held.at)
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
local function led_by_another(epoch)
  return tonumber(epoch) >= 0 and tonumber(epoch) ~= tonumber(redis.call('GET', 'leader:epoch') or '0')
end
"""
"""What scripts that write leases begin with."""

# KEYS leases, leases:held, leader:epoch. ARGV: leader's epoch, slot, job, lease, account
_GRANT = (
    CHARGE
    + """
if led_by_another(ARGV[1]) then return {'fenced'} end
if taken(ARGV[2], ARGV[3]) then return {'taken'} end
grant(ARGV[2], ARGV[4], ARGV[5])
return {'ok'}
"""
)

# KEYS leases, leases:held, leader:epoch. ARGV: leader's epoch, slot
_REVOKE = (
    CHARGE
    + """
if led_by_another(ARGV[1]) then return {'fenced'} end
charge(ARGV[2])
redis.call('HDEL', 'leases:held', ARGV[2])
redis.call('HDEL', 'leases', ARGV[2])
return {'ok'}
"""
)

# KEYS leases, leader:epoch. ARGV: leader's epoch, slot, job, incarnation, lease
_LEAVE_LEASE = (
    CHARGE
    + """
if led_by_another(ARGV[1]) then return {'fenced'} end
local before = redis.call('HGET', 'leases', ARGV[2])
if not before then return {'gone'} end
local lease = cjson.decode(before)
if lease.job ~= ARGV[3] or lease.incarnation ~= ARGV[4] then return {'gone'} end
redis.call('HSET', 'leases', ARGV[2], ARGV[5])
return {'ok'}
"""
)

# KEYS leases, leases:held
_CHARGE_ALL = CHARGE + "for _, slot in ipairs(redis.call('HKEYS', 'leases:held')) do charge(slot) end"

# KEYS leader, leader:epoch. ARGV: slot, incarnation, milliseconds. A slot's new process takes the place of the old one.
_LEAD = """
local before = redis.call('GET', KEYS[1])
if before then
  local leader = cjson.decode(before)
  if leader.slot ~= ARGV[1] then return 0 end
  if leader.incarnation == ARGV[2] then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return leader.epoch
  end
end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], cjson.encode({slot = ARGV[1], incarnation = ARGV[2], epoch = epoch}), 'PX', ARGV[3])
return epoch
"""

# KEYS leader. ARGV: incarnation
_RESIGN = """
local before = redis.call('GET', KEYS[1])
if before and cjson.decode(before).incarnation == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


# KEYS worker, workers. ARGV: id, info, milliseconds until it expires
_BEAT = """
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
"""

# KEYS worker. ARGV: incarnation
_LEAVE = """
local info = redis.call('GET', KEYS[1])
if info and cjson.decode(info).incarnation == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS workers. A member whose key has expired is taken out in the same act: a beat is never overlooked.
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
        self._beat = Script(redis, _BEAT)
        self._leave = Script(redis, _LEAVE)
        self._workers = Script(redis, _WORKERS)
        self._grant = Script(redis, _GRANT)
        self._revoke = Script(redis, _REVOKE)
        self._leave_lease = Script(redis, _LEAVE_LEASE)
        self._charge_all = Script(redis, _CHARGE_ALL)
        self._lead = Script(redis, _LEAD)
        self._resign = Script(redis, _RESIGN)

    async def beat(self, info: WorkerInfo, ttl_s: float) -> None:
        await self._beat(keys=[f"worker:{info.id}", "workers"], args=[info.id, codec.to_json(info), int(ttl_s * 1000)])

    async def leave(self, info: WorkerInfo) -> None:
        """Only what this incarnation said of itself: the slot's next process may be beating already."""
        await self._leave(keys=[f"worker:{info.id}"], args=[info.incarnation])

    async def workers(self) -> list[WorkerInfo]:
        """Those that beat, by id."""
        values = await self._workers(keys=["workers"])
        return sorted((codec.from_json(WorkerInfo, value) for value in values), key=lambda worker: worker.id)

    async def lives(self, worker: str, incarnation: str) -> bool:
        """Whether this very process has beaten lately."""
        value = await self.redis.get(f"worker:{worker}")
        return value is not None and codec.from_json(WorkerInfo, value).incarnation == incarnation

    # --- leases --------------------------------------------------------------------------------------------------

    async def lease(self, worker: str) -> Lease | None:
        value = await self.redis.hget("leases", worker)
        return None if value is None else codec.from_json(Lease, value)

    async def leases(self) -> list[Lease]:
        return [codec.from_json(Lease, value) for value in await self.redis.hvals("leases")]

    async def grant(self, lease: Lease, *, tenant: str = "", gpus: int = 0, leader: int = UNFENCED) -> None:
        """Also to change a lease that its job holds. Raises Fenced if another scheduler leads now, Conflict if another
        job holds the worker."""
        slot, text, account = granted(lease, tenant, gpus)
        answer = await self._grant(
            keys=["leases", "leases:held", "leader:epoch"], args=[leader, slot, lease.job, text, account]
        )
        raise_unless_granted(answer[0], [slot])

    async def leave_lease(self, leaving: Lease, *, leader: int = UNFENCED) -> None:
        """The same lease, with a time at which it ends. Raises Fenced, and Conflict if it is gone."""
        answer = await self._leave_lease(
            keys=["leases", "leader:epoch"],
            args=[leader, leaving.worker, leaving.job, leaving.incarnation, codec.to_json(leaving)],
        )
        if answer[0] == "gone":
            raise Conflict(f"{leaving.worker} does not work for job {leaving.job} any more")
        raise_unless_granted(answer[0], [leaving.worker])

    async def revoke(self, worker: str, *, leader: int = UNFENCED) -> None:
        """Raises Fenced."""
        answer = await self._revoke(keys=["leases", "leases:held", "leader:epoch"], args=[leader, worker])
        raise_unless_granted(answer[0], [worker])

    # --- what is held is counted ---------------------------------------------------------------------------------

    async def charge(self) -> None:
        """Count, among what jobs have spent, what all leases have held until now; leases that end are counted then."""
        await self._charge_all(keys=["leases", "leases:held"])

    # --- who leads -----------------------------------------------------------------------------------------------

    async def lead(self, slot: str, incarnation: str, ttl_s: float) -> int | None:
        """Become the scheduler that leads, or stay it: its epoch. None while another one does."""
        epoch = await self._lead(keys=["leader", "leader:epoch"], args=[slot, incarnation, int(ttl_s * 1000)])
        return int(epoch) or None

    async def resign(self, incarnation: str) -> None:
        """Let the next one lead at once."""
        await self._resign(keys=["leader"], args=[incarnation])


def granted(lease: Lease, tenant: str, gpus: int) -> tuple[str, bytes, bytes]:
    """Slot, lease and account, as scripts take them."""
    account = Account(tenant=tenant, job=lease.job, gpus=gpus)
    return lease.worker, codec.to_json(lease), codec.to_json(account)


def raise_unless_granted(answer: str, slots: Sequence[str]) -> None:
    match answer:
        case "fenced":
            raise Fenced("another scheduler leads now")
        case "taken":
            raise Conflict(f"another job holds one of {', '.join(slots)}")
