"""Rows of a tenant's jobs: the fields by which lists are filtered, sorted and grouped, and the labels among them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from opentinker.shared.state.job_scripts import LABEL
from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.core import LABELS, MAX_TAGS, JobState
from opentinker.shared.types.errors import Conflict, NotFound

MOST_ROWS = 10_000
"""Jobs of a tenant that a filter or an order looks at: the newest."""
ROWS_AT_ONCE = 1000
"""Jobs per request to Redis: decoding them takes about 20 ms, after which others get their turn."""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """What lists of jobs are filtered and sorted by."""

    id: str
    name: str
    kind: str
    state: JobState
    created: float
    updated: float
    finished: float = 0.0
    step: int = 0
    key: str = ""
    project: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    model: str = ""
    environment: str = ""


FIELDS = JobRow.__struct_fields__[1:]


class JobRows:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._label = Script(redis, LABEL)

    async def of(self, tenant: str) -> list[JobRow]:
        """Return the rows of the tenant's newest MOST_ROWS jobs, newest first."""
        ids = await self._redis.zrevrange(jobs_key(tenant), 0, MOST_ROWS - 1)
        rows = []
        for start in range(0, len(ids), ROWS_AT_ONCE):
            asked = ids[start : start + ROWS_AT_ONCE]
            pipe = self._redis.pipeline(transaction=False)
            for id in asked:
                pipe.hmget(f"job:{id}", *FIELDS)
            rows += [_row(id, values) for id, values in zip(asked, await pipe.execute(), strict=True) if values[0]]
        return rows

    async def label(self, id: str, values: Mapping[str, Any], add: Sequence[str], remove: Sequence[str]) -> None:
        """Change labels of a job, over or not. `values` replace those of LABELS; `add` and `remove` are tags.

        Raises NotFound, and Conflict if the job would have more than MAX_TAGS tags.
        """
        lists = [orjson.dumps(list(tags)).decode() for tags in (add, remove)]
        fields = orjson.dumps(label_fields(values)).decode()
        answer = await self._label(keys=[f"job:{id}"], args=[time.time(), fields, *lists, MAX_TAGS])
        if answer[0] == "missing":
            raise NotFound(f"no job {id!r}")
        if answer[0] == "many":
            raise Conflict(f"job {id} would have {answer[1]} tags; {MAX_TAGS} are allowed")


def jobs_key(tenant: str) -> str:
    """Return the key of the sorted set of a tenant's jobs."""
    return f"jobs:of:{tenant}"


def label_fields(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash fields of those labels that are given."""
    given = {name: labels[name] for name in LABELS if name in labels}
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in given.items()}


def _row(id: str, values: list[str | None]) -> JobRow:
    fields = {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}
    return msgspec.convert({**fields, "id": id, "tags": orjson.loads(fields.get("tags", "[]"))}, JobRow, strict=False)
