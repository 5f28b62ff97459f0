"""Accounts for the cost of jobs, once, in Redis: by job, and by tenant and day.

Keys (`day` counts from 1970, UTC):
    spent:job:{id}           hash: worker_s, gpu_s, cpu_s, tokens_generated, tokens_trained of a job
    spent:{tenant}:{day}     hash: the same of a tenant's day, and the most bytes that it stored; kept for 400 days
    spent:seen:{id}:{source} hash: totals reported by a source, so that a repetition adds nothing; kept for a week
    spent:step:{id}          the last optimizer step whose tokens are counted: one that is trained again is not

Worker and GPU seconds are those of leases, counted by the scripts that write leases (lease_table.py), and need no
report of workers. Quantities that only a worker knows are reported as totals of its lease, repeatedly: a lost report is
contained in the next."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from redis.exceptions import RedisError

from opentinker.shared.asyncio_tools import cancel_and_wait, every, finish_uncancelled
from opentinker.shared.state.redis_script import UNFENCED, LeadersScript, Script, read_hashes
from opentinker.shared.types.core import part_id

log = structlog.get_logger()

DAY_S = 86_400
DAYS = 400
SEEN_S = 7 * DAY_S
REPORT_S = 5.0
LAST_S = 2.0
"""For the last word of a lease."""
KINDS = ("worker_s", "gpu_s", "cpu_s", "tokens_generated", "tokens_trained")
"""Seconds of leased workers, the same times their GPUs, processor time of theirs, tokens sampled and trained on."""
STORED = "bytes_stored"
EPOCH = date(1970, 1, 1)

_ADD = f"""
local tenant = redis.call('HGET', KEYS[1], 'tenant')
local function add(kind, more)
  if not tenant or more <= 0 then return end
  local day = 'spent:' .. tenant .. ':' .. math.floor(tonumber(ARGV[1]) / {DAY_S})
  for _, key in ipairs({{KEYS[2], day}}) do redis.call('HINCRBYFLOAT', key, kind, string.format('%.6f', more)) end
  redis.call('EXPIRE', day, {DAYS * DAY_S})
end
"""

# KEYS job, usage of the job, seen. ARGV: now, kind, total, kind, total ...
_COUNT = f"""
for i = 2, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', KEYS[3], ARGV[i]) or '0')
  local total = tonumber(ARGV[i + 1])
  if total > before then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
    add(ARGV[i], total - before)
  end
end
redis.call('EXPIRE', KEYS[3], {SEEN_S})
"""

# KEYS job, usage of the job, step. ARGV: now, step, tokens
_TRAINED = """
if tonumber(ARGV[2]) > tonumber(redis.call('GET', KEYS[3]) or '0') then
  redis.call('SET', KEYS[3], ARGV[2])
  add('tokens_trained', tonumber(ARGV[3]))
end
"""

# KEYS day. ARGV: leader, field, bytes, seconds
_STORE = """
if tonumber(ARGV[3]) > tonumber(redis.call('HGET', KEYS[1], ARGV[2]) or '0') then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
  redis.call('EXPIRE', KEYS[1], ARGV[4])
end
"""


class UsageStore:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._count, self._trained = Script(redis, _ADD + _COUNT), Script(redis, _ADD + _TRAINED)
        self._store = LeadersScript(redis, _STORE)

    async def count(self, job: str, source: str, totals: Mapping[str, float]) -> None:
        """Add a source's totals since its start to the job; every lease is a separate `source`."""
        said = [part for kind, total in totals.items() for part in (kind, repr(round(total, 6)))]
        keys = [f"job:{job}", f"spent:job:{job}", f"spent:seen:{job}:{source}"]
        await self._count(keys=keys, args=[time.time(), *said])

    async def trained(self, job: str, step: int, tokens: float, policy: str = "") -> None:
        """Count the tokens of one optimizer step, of one policy of a job with several."""
        keys = [f"job:{job}", f"spent:job:{job}", f"spent:step:{part_id(job, policy)}"]
        await self._trained(keys=keys, args=[time.time(), step, tokens])

    async def of_jobs(self, ids: Sequence[str]) -> list[dict[str, float]]:
        return await self._read([f"spent:job:{id}" for id in ids])

    async def of_days(self, tenant: str, first: date, last: date) -> dict[date, dict[str, float]]:
        """Return usage per day, for days on which anything was spent or stored."""
        days = [first + timedelta(days=more) for more in range((last - first).days + 1)]
        found = await self._read([_of_day(tenant, day) for day in days], (*KINDS, STORED))
        return {day: spent for day, spent in zip(days, found, strict=True) if any(spent.values())}

    async def today(self, tenants: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return usage by tenant since midnight UTC."""
        day = datetime.now(UTC).date()
        found = await self._read([_of_day(tenant, day) for tenant in tenants])
        return dict(zip(tenants, found, strict=True))

    async def store(self, tenant: str, size: int, *, leader: int = UNFENCED) -> None:
        """Record the bytes stored now: the largest value of a day counts. Raises Fenced."""
        day = _of_day(tenant, datetime.now(UTC).date())
        await self._store(leader=leader, keys=[day], args=[STORED, size, DAYS * DAY_S])

    async def _read(self, keys: Sequence[str], kinds: Sequence[str] = KINDS) -> list[dict[str, float]]:
        found = await read_hashes(self._redis, keys)
        return [{kind: float(hash.get(kind, 0)) for kind in kinds} for hash in found]


@asynccontextmanager
async def metered(
    redis: Any,
    job: str,
    spent: Counter[str],
    report_s: float = REPORT_S,
    cpu: Callable[[], float] | None = None,
) -> AsyncIterator[None]:
    """Count for the job, while the block runs, the processor time of this process and its children, and what the block
    puts into `spent`. `cpu`: the job's seconds, of a process that works for several. A cancellation during the last
    report takes effect after it."""
    usage, source = UsageStore(redis), uuid.uuid4().hex[:12]
    cpu = cpu or cpu_seconds
    cpu_began = await asyncio.to_thread(cpu)

    async def report() -> None:
        cpu_s = max(0.0, await asyncio.to_thread(cpu) - cpu_began)
        totals = {"cpu_s": cpu_s, **spent}
        try:
            await usage.count(job, source, totals)
        except RedisError as error:
            log.warning("usage_deferred", error=str(error))  # the next report includes it

    task = asyncio.create_task(every(report_s, report))

    async def end() -> None:
        await cancel_and_wait(task)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await report()

    try:
        yield
    finally:
        await finish_uncancelled(end())  # a lease may be taken back while its work ends by itself


def _of_day(tenant: str, day: date) -> str:
    return f"spent:{tenant}:{(day - EPOCH).days}"


def cpu_seconds(proc: Path = Path("/proc")) -> float:
    """Return CPU seconds of this process and all its descendants, including ended ones. Blocking; only this process
    where there is no /proc."""
    if not (proc / "self" / "stat").exists():
        return time.process_time()
    ticks, pids = 0, ["self"]
    while pids:
        place = proc / pids.pop()
        try:
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            for thread in (place / "task").iterdir():
                pids += (thread / "children").read_text().split()
        except (OSError, ValueError):  # it has ended since
            continue
    return ticks / os.sysconf("SC_CLK_TCK")
