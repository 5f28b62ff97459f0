"""Rows of a tenant's jobs or sweeps: the fields by which lists are filtered, sorted and grouped, and the labels among
them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from opentinker.shared.state.job_scripts import LABEL
from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.core import LABELS, MAX_TAGS, JobState
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.sweeps import MAX_SWEEP_TAGS

MOST_ROWS = 10_000
"""Jobs, or sweeps, of a tenant that a filter or an order looks at: the newest."""
ROWS_AT_ONCE = 1000
"""Jobs per request to Redis, which reads them in about 8 ms and serves others afterwards."""
MOST_TENANTS = 8
"""Tenants whose rows are kept: those that asked last."""
MOST_NOTES = 5_000_000
"""Characters of notes, of a tenant whose rows are kept."""
_STAMPS = """
local stamps = {}
for at, key in ipairs(KEYS) do stamps[at] = redis.call('HGET', key, 'updated') or '' end
return stamps
"""
"""When each was changed last; '' if it does not exist. Takes a third of the time that rows take."""
_READ = """
local fields, absent, prefix = cjson.decode(ARGV[1]), cjson.decode(ARGV[2]), #ARGV[3]
local rows = {}
for _, key in ipairs(KEYS) do
  local row = redis.call('HMGET', key, unpack(fields))
  if row[1] then
    for at, value in ipairs(row) do row[at] = value or absent[at] end
    row[#fields] = cjson.decode(row[#fields])
    row[#fields + 1] = string.sub(key, prefix + 1)
    rows[#rows + 1] = row
  end
end
return cmsgpack.pack(rows)
"""
"""Rows as MessagePack: fields in their order, the tags last of them, then the id."""


class ListRow(msgspec.Struct, frozen=True, array_like=True):
    """Fields by which lists of jobs and of sweeps are filtered and sorted."""

    name: str
    kind: str
    state: JobState
    """A sweep's too: its states are states of jobs."""
    created: float
    updated: float
    finished: float
    step: int
    """0 for a sweep."""
    key: str
    project: str
    notes: str
    model: str
    environment: str
    tags: tuple[str, ...]
    id: str


FIELDS = ListRow.__struct_fields__[:-1]
_ABSENT = ["0" if name in ("created", "updated", "finished", "step") else "" for name in FIELDS[:-1]] + ["[]"]
_DECODER = msgspec.msgpack.Decoder(list[ListRow], strict=False)


class ListRows:
    """Rows are kept, and only those are read anew that have changed since."""

    def __init__(self, redis: Any, of: Literal["job", "sweep"] = "job") -> None:
        self._redis, self._noun = redis, of
        self._most_tags = MAX_TAGS if of == "job" else MAX_SWEEP_TAGS
        self._label = Script(redis, LABEL)
        self._read, self._read_stamps = Script(redis, _READ, binary=True), Script(redis, _STAMPS)
        self._known: dict[str, dict[str, ListRow]] = {}

    async def of(self, tenant: str) -> list[ListRow]:
        """Return the rows of the tenant's newest MOST_ROWS jobs or sweeps, newest first."""
        ids = await self._redis.zrevrange(tenants_key(self._noun, tenant), 0, MOST_ROWS - 1)
        known = self._known.pop(tenant, {})
        stamps = await self._stamps(ids) if known else {}
        current = {id: known[id] for id, stamp in stamps.items() if id in known and known[id].updated == stamp}
        current |= {row.id: row for row in await self._rows([id for id in ids if id not in current])}
        if sum(len(row.notes) for row in current.values()) <= MOST_NOTES:
            self._known[tenant] = current
        for idle in list(self._known)[:-MOST_TENANTS]:
            del self._known[idle]
        return [current[id] for id in ids if id in current]

    async def _stamps(self, ids: Sequence[str]) -> dict[str, float | None]:
        """Return when each was changed last; None if it does not exist."""
        found = [stamp for keys in self._keys(ids) for stamp in await self._read_stamps(keys=keys)]
        return {id: float(stamp) if stamp else None for id, stamp in zip(ids, found, strict=True)}

    async def _rows(self, ids: Sequence[str]) -> list[ListRow]:
        args = [*(orjson.dumps(names).decode() for names in (FIELDS, _ABSENT)), f"{self._noun}:"]
        return [row for keys in self._keys(ids) for row in _DECODER.decode(await self._read(keys=keys, args=args))]

    def _keys(self, ids: Sequence[str]) -> list[list[str]]:
        """Return the keys of the records, as many together as one request reads."""
        keys = [f"{self._noun}:{id}" for id in ids]
        return [keys[start : start + ROWS_AT_ONCE] for start in range(0, len(keys), ROWS_AT_ONCE)]

    async def label(self, id: str, values: Mapping[str, Any], add: Sequence[str], remove: Sequence[str]) -> None:
        """Change labels of a job or sweep, over or not. `values` replace those of LABELS; `add` and `remove` are tags.

        Raises NotFound, and Conflict if it would have too many tags.
        """
        lists = [orjson.dumps(list(tags)).decode() for tags in (add, remove)]
        fields = orjson.dumps(label_fields(values)).decode()
        answer = await self._label(keys=[f"{self._noun}:{id}"], args=[time.time(), fields, *lists, self._most_tags])
        if answer[0] == "missing":
            raise NotFound(f"no {self._noun} {id!r}")
        if answer[0] == "many":
            raise Conflict(f"{self._noun} {id} would have {answer[1]} tags; {self._most_tags} are allowed")


def tenants_key(noun: str, tenant: str) -> str:
    """Return the key of the sorted set of a tenant's jobs or sweeps."""
    return f"{noun}s:of:{tenant}"


def label_fields(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash fields of those labels that are given."""
    given = {name: labels[name] for name in LABELS if name in labels}
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in given.items()}
