"""What is kept of jobs, and under which names it is published: nouns, and their place in Redis.

Keys:
    artifact:{job}       hash: path -> Kept, all that is in the artifact store of a job
    stored:{tenant}      sorted set: job -> bytes of that
    artifact:tenants     set of tenants that have stored something
    published:{tenant}   hash: name -> Publication
    artifact:open        set of jobs that leave something behind and are not all in the store yet
    artifact:expiry      sorted set: job -> when what is kept of it expires
    artifact:removing    set of `{tenant}/{job}/{path}`: out of the index, about to be deleted in the store

What is in the index is in the store; what leaves the index is deleted there afterwards, also if somebody dies between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from opentinker.shared import codec
from opentinker.shared.errors import Conflict, NotFound
from opentinker.shared.manifest import Manifest, name_of
from opentinker.shared.script import Script

CHECKPOINTS = "checkpoints"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or a file in the artifact store."""

    path: str
    """`checkpoints/step-000050`, which is a directory, or that of a file."""
    bytes: int
    created: float
    sha256: str = ""
    """Of a file."""
    manifest: Manifest | None = None
    """Of a checkpoint."""
    metric: float | None = None
    """Of a checkpoint: what the job's `artifacts.best_metric` was at its step."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with a name that its tenant's people know."""

    name: str
    job: str
    step: int
    bytes: int
    created: float
    key: str
    """Id of the key that published it."""

    @property
    def path(self) -> str:
        return checkpoint_path(self.step)


def checkpoint_path(step: int) -> str:
    """Of a checkpoint's directory in its job's."""
    return f"{CHECKPOINTS}/{name_of(step)}"


# KEYS artifact, stored, tenants. ARGV: job, path, entry, bytes, tenant
_ADD = """
local before = redis.call('HGET', KEYS[1], ARGV[2])
local more = tonumber(ARGV[4])
if before then more = more - cjson.decode(before).bytes end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('ZINCRBY', KEYS[2], more, ARGV[1])
redis.call('SADD', KEYS[3], ARGV[5])
"""

# KEYS artifact, stored, published, removing. ARGV: job, tenant, path ...
_REMOVE = """
local published = {}
for _, text in ipairs(redis.call('HVALS', KEYS[3])) do
  local one = cjson.decode(text)
  if one.job == ARGV[1] then published[one.step] = true end
end
local gone = {}
for i = 3, #ARGV do
  local text = redis.call('HGET', KEYS[1], ARGV[i])
  local kept = text and cjson.decode(text)
  if kept and not (type(kept.manifest) == 'table' and published[kept.manifest.step]) then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZINCRBY', KEYS[2], -kept.bytes, ARGV[1])
    redis.call('SADD', KEYS[4], ARGV[2] .. '/' .. ARGV[1] .. '/' .. ARGV[i])
    gone[#gone + 1] = ARGV[i]
  end
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('ZREM', KEYS[2], ARGV[1]) end
return gone
"""

# KEYS artifact. ARGV: path, entry, entry as it shall be
_NOTE = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
"""

# KEYS published, artifact. ARGV: name, publication, path, job, step
_PUBLISH = """
local before = redis.call('HGET', KEYS[1], ARGV[1])
if before then
  local one = cjson.decode(before)
  if one.job == ARGV[4] and one.step == tonumber(ARGV[5]) then return {'ok', before} end
  return {'taken', one.job .. '@' .. one.step}
end
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return {'missing'} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'ok', ARGV[2]}
"""


class ArtifactIndex:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._add, self._remove = Script(redis, _ADD), Script(redis, _REMOVE)
        self._publish, self._note = Script(redis, _PUBLISH), Script(redis, _NOTE)

    # --- what is kept --------------------------------------------------------------------------------------------

    async def of(self, job: str) -> dict[str, Kept]:
        """By path."""
        found = await self._redis.hgetall(f"artifact:{job}")
        return {path: codec.from_json(Kept, text) for path, text in found.items()}

    async def add(self, tenant: str, job: str, kept: Kept) -> None:
        keys = [f"artifact:{job}", f"stored:{tenant}", "artifact:tenants"]
        await self._add(keys=keys, args=[job, kept.path, codec.to_json(kept), kept.bytes, tenant])

    async def remove(self, tenant: str, job: str, paths: Sequence[str]) -> list[str]:
        """From the index, and into the set of what is to be deleted. Returns which: what is published stays."""
        keys = [f"artifact:{job}", f"stored:{tenant}", f"published:{tenant}", "artifact:removing"]
        return list(await self._remove(keys=keys, args=[job, tenant, *paths])) if paths else []

    async def note(self, job: str, kept: Kept, metric: float | None) -> None:
        """What was measured of it, if it is still there and the same."""
        key = f"artifact:{job}"
        text = await self._redis.hget(key, kept.path)
        if text is not None and codec.from_json(Kept, text) == kept:
            new = msgspec.structs.replace(kept, metric=metric)
            await self._note(keys=[key], args=[kept.path, text, codec.to_json(new)])

    async def removing(self) -> list[str]:
        return sorted(await self._redis.smembers("artifact:removing"))

    async def removed(self, key: str) -> None:
        """It is deleted in the store."""
        await self._redis.srem("artifact:removing", key)

    # --- whose turn it is ----------------------------------------------------------------------------------------

    async def open(self, *jobs: str) -> None:
        """They leave something behind."""
        if jobs:
            await self._redis.sadd("artifact:open", *jobs)

    async def opened(self) -> list[str]:
        return sorted(await self._redis.smembers("artifact:open"))

    async def close(self, job: str, expires: float | None) -> None:
        """All of it is in the store; `expires`: until then, or for ever."""
        if expires is not None:
            await self._redis.zadd("artifact:expiry", {job: expires})
        await self._redis.srem("artifact:open", job)

    async def expired(self, now: float) -> list[str]:
        return list(await self._redis.zrangebyscore("artifact:expiry", "-inf", now))

    async def expires(self, job: str) -> float | None:
        found = await self._redis.zscore("artifact:expiry", job)
        return None if found is None else float(found)

    async def over(self, job: str) -> None:
        """Nothing is left that could expire."""
        await self._redis.zrem("artifact:expiry", job)

    # --- how much there is ---------------------------------------------------------------------------------------

    async def stored(self, tenant: str) -> dict[str, int]:
        """Bytes by job, the largest first."""
        found = await self._redis.zrevrange(f"stored:{tenant}", 0, -1, withscores=True)
        return {job: int(size) for job, size in found}

    async def tenants(self) -> list[str]:
        """That have stored something."""
        return sorted(await self._redis.smembers("artifact:tenants"))

    # --- names ---------------------------------------------------------------------------------------------------

    async def publish(self, tenant: str, name: str, job: str, kept: Kept, key: str) -> Publication:
        """The same again changes nothing. Raises Conflict if another checkpoint has the name, NotFound if this one has
        gone meanwhile."""
        assert kept.manifest is not None
        step = kept.manifest.step
        new = Publication(name=name, job=job, step=step, bytes=kept.bytes, created=time.time(), key=key)
        answer = await self._publish(
            keys=[f"published:{tenant}", f"artifact:{job}"], args=[name, codec.to_json(new), kept.path, job, step]
        )
        match answer[0]:
            case "taken":
                raise Conflict(f"{name!r} is the name of {answer[1]}; `opentinker unpublish {name}` frees it")
            case "missing":
                raise NotFound(f"the checkpoint of step {step} of job {job} has just been removed")
        return codec.from_json(Publication, answer[1])

    async def published(self, tenant: str) -> dict[str, Publication]:
        """By name."""
        found = await self._redis.hgetall(f"published:{tenant}")
        return {name: codec.from_json(Publication, found[name]) for name in sorted(found)}

    async def publication(self, tenant: str, name: str) -> Publication:
        """Raises NotFound."""
        text = await self._redis.hget(f"published:{tenant}", name)
        if text is None:
            raise NotFound(f"no checkpoint is published as {name[:100]!r}; `opentinker published` lists yours")
        return codec.from_json(Publication, text)

    async def unpublish(self, tenant: str, name: str) -> Publication:
        """Raises NotFound."""
        found = await self.publication(tenant, name)
        await self._redis.hdel(f"published:{tenant}", name)
        return found
