"""Jobs that are not over, read by loops many times a second: a queue may hold thousands that have not changed since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.core import HELD, JobRecord

ACTIVE = "jobs:active"
PORTION = 100
"""Records that are read and decoded at a time: other tasks run in between."""
STAMP = ("state", "updated", "version")
"""Fields of a job of which one differs after each change."""
Stamp = list[str]
# KEYS active. Answers id and stamp of each job, one after another.
_STAMPS = f"""
local found = {{}}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local stamp = redis.call('HMGET', 'job:' .. id, '{"', '".join(STAMP)}')
  if stamp[1] then
    table.insert(found, id)
    for at = 1, {len(STAMP)} do table.insert(found, stamp[at]) end
  end
end
return found
"""


class ActiveJobs:
    """`read`: returns the records of those of the given jobs that exist. Its records are kept until they change."""

    def __init__(self, redis: Any, read: Callable[[Sequence[str]], Awaitable[list[JobRecord]]]) -> None:
        self._read, self._read_stamps = read, Script(redis, _STAMPS)
        self._known: dict[str, tuple[Stamp, JobRecord]] = {}

    async def all(self) -> list[JobRecord]:
        """Return them, oldest first."""
        stamps = await self._stamps()
        self._known = {id: one for id, one in self._known.items() if id in stamps}
        changed = [id for id, stamp in stamps.items() if id not in self._known or self._known[id][0] != stamp]
        found = {job.id: (stamps[job.id], job) for job in await self._in_portions(changed)}
        self._known |= found
        return sorted((job for _, job in self._known.values() if job.id in stamps), key=lambda job: job.created)

    async def held(self) -> list[JobRecord]:
        """Return those that have begun, oldest first."""
        stamps = await self._stamps()
        jobs = await self._in_portions([id for id, (state, *_) in stamps.items() if state in HELD])
        return sorted((job for job in jobs if job.state.held), key=lambda job: job.created)

    async def _stamps(self) -> dict[str, Stamp]:
        found = await self._read_stamps(keys=[ACTIVE])
        return {id: stamp for id, *stamp in zip(*[iter(found)] * (1 + len(STAMP)), strict=True)}

    async def _in_portions(self, ids: Sequence[str]) -> list[JobRecord]:
        return [job for first in range(0, len(ids), PORTION) for job in await self._read(ids[first : first + PORTION])]
