"""Index of stored artifacts and of the names under which they are published: types, and their keys in Redis.

Keys:
    artifact:{job}       hash: path -> Kept, all that is in the artifact store of a job
    stored:{tenant}      sorted set: job -> bytes of that
    artifact:tenants     set of tenants that have stored something
    published:{tenant}   hash: name -> Publication
    artifact:open        set of jobs that leave something behind and are not all in the store yet
    artifact:expiry      sorted set: job -> when what is kept of it expires
    artifact:removing    set of `{tenant}/{job}/{place}`: out of the index, about to be deleted in the store
    artifact:removed     sorted set of those that were deleted, by time, for a day: nothing is put there again
    artifact:sweeping    set of `{job}/{path}`, or `{job}`: about to be deleted in the jobs' directories

Everything in the index is in the store, under a key that is never used twice; an artifact that leaves the index is
deleted from the store afterwards, even if a process dies in between. Files are deleted only after the index lists them
for deletion, and nothing listed returns: so a late deletion removes nothing else. Writes of the leading scheduler carry
its leadership number (`leader`) and are refused with Fenced once another one leads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from opentinker.shared.state.redis_script import UNFENCED, LeadersScript, Script
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.manifest import Manifest, name_of

CHECKPOINTS = "checkpoints"
REMOVING, REMOVED, SWEEPING = "artifact:removing", "artifact:removed", "artifact:sweeping"
NONE = "artifact:none"
"""Placeholder key for arguments that a script does not use."""


class TrainingEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a checkpoint's weights that its own job made while it trained."""

    finished: float
    """Unix seconds."""
    values: dict[str, float]
    """val/* metrics."""


class ArtifactEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or a file in the artifact store."""

    path: str
    """`checkpoints/step-000050`, which is a directory, or that of a file."""
    place: str = ""
    """Below the job in the store: the path and a mark."""
    bytes: int
    created: float
    sha256: str = ""
    """SHA-256 of a file; empty for checkpoints."""
    manifest: Manifest | None = None
    """Manifest of a checkpoint; None for files."""
    metric: float | None = None
    """Value of the job's `artifacts.best_metric` at the checkpoint's step."""
    evaluation: TrainingEvaluation | None = None
    """A checkpoint's evaluation, once there is one."""

    @property
    def at(self) -> str:
        """Below the job in the store; before there were places it was the path."""
        return self.place or self.path


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
    """Return the path of a checkpoint below its job's directory."""
    return f"{CHECKPOINTS}/{name_of(step)}"


_PUBLISHED = """
local function at(kept) return kept.place ~= '' and kept.place or kept.path end
local function published_of(key, job)
  local found = {}
  for _, text in ipairs(redis.call('HVALS', key)) do
    local one = cjson.decode(text)
    if one.job == job then found[one.step] = true end
  end
  return found
end
local function is_published(kept, published) return type(kept.manifest) == 'table' and published[kept.manifest.step] end
"""

# KEYS artifact, stored, published, removing, tenants. ARGV: leader, job, tenant, path, entry, place of the one before
_ADD = """
local text = redis.call('HGET', KEYS[1], ARGV[4])
if text == ARGV[5] then return 'ok' end
local more = cjson.decode(ARGV[5]).bytes
local before = text and cjson.decode(text)
if (before and at(before) or '') ~= ARGV[6] then return 'changed' end
if before then
  if is_published(before, published_of(KEYS[3], ARGV[2])) then return 'published' end
  redis.call('SADD', KEYS[4], ARGV[3] .. '/' .. ARGV[2] .. '/' .. at(before))
  more = more - before.bytes
end
redis.call('HSET', KEYS[1], ARGV[4], ARGV[5])
redis.call('ZINCRBY', KEYS[2], more, ARGV[2])
redis.call('SADD', KEYS[5], ARGV[3])
return 'ok'
"""

# KEYS artifact, stored, published, removing. ARGV: leader, job, tenant, path ...
_REMOVE = """
local published, gone = published_of(KEYS[3], ARGV[2]), {}
for i = 4, #ARGV do
  local text = redis.call('HGET', KEYS[1], ARGV[i])
  local kept = text and cjson.decode(text)
  if kept and not is_published(kept, published) then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZINCRBY', KEYS[2], -kept.bytes, ARGV[2])
    redis.call('SADD', KEYS[4], ARGV[3] .. '/' .. ARGV[2] .. '/' .. at(kept))
    gone[#gone + 1] = ARGV[i]
  end
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('ZREM', KEYS[2], ARGV[2]) end
return gone
"""

# KEYS artifact, removing. ARGV: leader, path, key in the store, place. Nothing, if it is what the index means.
_DISCARD = """
local text = redis.call('HGET', KEYS[1], ARGV[2])
if text and at(cjson.decode(text)) == ARGV[4] then return 0 end
return redis.call('SADD', KEYS[2], ARGV[3])
"""

# KEYS removing, removed. ARGV: leader, key in the store, now, forgotten since
_REMOVED = """
redis.call('SREM', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[4])
"""

# KEYS sweeping, published, artifact. ARGV: leader, job, '1' = only what is in the index too, path, step ...
_SWEEP = """
local published, new = published_of(KEYS[2], ARGV[2]), {}
for i = 4, #ARGV, 2 do
  local name = ARGV[i] == '' and ARGV[2] or ARGV[2] .. '/' .. ARGV[i]
  local safe = redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1
  if ARGV[3] ~= '1' then safe = not published[tonumber(ARGV[i + 1])] end
  if safe and redis.call('SADD', KEYS[1], name) == 1 then new[#new + 1] = ARGV[i] end
end
return new
"""

# KEYS artifact. ARGV: leader, path, entry, entry as it shall be
_NOTE = """
if redis.call('HGET', KEYS[1], ARGV[2]) == ARGV[3] then redis.call('HSET', KEYS[1], ARGV[2], ARGV[4]) end
"""

# KEYS open. ARGV: leader, jobs ...
_SREM, _ZREM = (f"redis.call('{command}', KEYS[1], ARGV[2])" for command in ("SREM", "ZREM"))
_OPEN = "redis.call('SADD', KEYS[1], unpack(ARGV, 2))"

# KEYS open, expiry. ARGV: leader, job, when it expires or ''
_CLOSE = """
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2]) end
redis.call('SREM', KEYS[1], ARGV[2])
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

# KEYS artifact ... ARGV: most entries of a job. The entries of checkpoints, the highest step first, by job.
_CHECKPOINTS = """
local found = {}
for at, key in ipairs(KEYS) do
  local paths, own = {}, {}
  for _, path in ipairs(redis.call('HKEYS', key)) do
    if string.sub(path, 1, 12) == 'checkpoints/' then paths[#paths + 1] = path end
  end
  table.sort(paths, function(a, b) return #a > #b or (#a == #b and a > b) end)
  for i = 1, math.min(#paths, tonumber(ARGV[1])) do own[i] = redis.call('HGET', key, paths[i]) end
  found[at] = own
end
return found
"""


REMEMBERED_S = 86_400.0
"""Time for which removed artifacts are remembered."""


class ArtifactIndex:
    """Methods with `leader` raise Fenced; callers that only carry out a request leave it out."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._add, self._remove = LeadersScript(redis, _PUBLISHED + _ADD), LeadersScript(redis, _PUBLISHED + _REMOVE)
        self._discard, self._removed = LeadersScript(redis, _PUBLISHED + _DISCARD), LeadersScript(redis, _REMOVED)
        self._sweep, self._swept = LeadersScript(redis, _PUBLISHED + _SWEEP), LeadersScript(redis, _SREM)
        self._note, self._open = LeadersScript(redis, _NOTE), LeadersScript(redis, _OPEN)
        self._close, self._over = LeadersScript(redis, _CLOSE), LeadersScript(redis, _ZREM)
        self._publish, self._checkpoints = Script(redis, _PUBLISH), Script(redis, _CHECKPOINTS)

    # --- what is kept --------------------------------------------------------------------------------------------

    async def of(self, job: str) -> dict[str, ArtifactEntry]:
        """Return the entries by path."""
        found = await self._redis.hgetall(f"artifact:{job}")
        return {path: codec.from_json(ArtifactEntry, text) for path, text in found.items()}

    async def checkpoints_of(self, jobs: Sequence[str], limit: int) -> list[list[ArtifactEntry]]:
        """Return the checkpoints of each job, the highest steps first, `limit` of a job at most."""
        found = await self._checkpoints(keys=[f"artifact:{job}" for job in jobs], args=[limit]) if jobs else []
        return [[codec.from_json(ArtifactEntry, text) for text in texts] for texts in found]

    async def add(
        self, tenant: str, job: str, kept: ArtifactEntry, *, before: ArtifactEntry | None = None, leader: int = UNFENCED
    ) -> str:
        """Enter a file in the place of `before`, which is deleted in the store afterwards. Return `ok`; `changed`:
        another one is there by now; `published`: it stays."""
        keys = [f"artifact:{job}", f"stored:{tenant}", f"published:{tenant}", REMOVING, "artifact:tenants"]
        args = [job, tenant, kept.path, codec.to_json(kept), "" if before is None else before.at]
        return str(await self._add(leader=leader, keys=keys, args=args))

    async def remove(self, tenant: str, job: str, paths: Sequence[str], *, leader: int = UNFENCED) -> list[str]:
        """Move entries from the index into the set of files to delete. Return the removed ones: published ones stay."""
        keys = [f"artifact:{job}", f"stored:{tenant}", f"published:{tenant}", REMOVING]
        return list(await self._remove(leader=leader, keys=keys, args=[job, tenant, *paths])) if paths else []

    async def note(self, job: str, kept: ArtifactEntry, new: ArtifactEntry, *, leader: int = UNFENCED) -> None:
        """Replace the entry by what has been measured since, if the artifact still exists unchanged."""
        key = f"artifact:{job}"
        text = await self._redis.hget(key, kept.path)
        if text is not None and codec.from_json(ArtifactEntry, text) == kept:
            await self._note(leader=leader, keys=[key], args=[kept.path, text, codec.to_json(new)])

    async def removing(self) -> list[str]:
        return sorted(await self._redis.smembers(REMOVING))

    async def discard(self, tenant: str, job: str, path: str, place: str, *, leader: int = UNFENCED) -> None:
        """Mark an upload that was never indexed for deletion."""
        key = f"{tenant}/{job}/{place}"
        await self._discard(leader=leader, keys=[f"artifact:{job}", REMOVING], args=[path, key, place])

    async def removed(self, key: str, *, leader: int = UNFENCED) -> None:
        """Record that a file is deleted in the store."""
        now = time.time()
        await self._removed(leader=leader, keys=[REMOVING, REMOVED], args=[key, now, now - REMEMBERED_S])

    async def is_removed(self, key: str) -> bool:
        """Return whether the file was deleted, or is to be: nothing may be put there."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.sismember(REMOVING, key)
        pipe.zscore(REMOVED, key)
        removing, removed = await pipe.execute()
        return bool(removing) or removed is not None

    # --- files that jobs' directories no longer need -----------------------------------------------------------------

    async def sweep(
        self, tenant: str, job: str, steps: Iterable[int], *, kept: bool = False, leader: int = UNFENCED
    ) -> set[int]:
        """Checkpoints of a job that is over are to be deleted in its directory: of those that are not published, or
        with `kept` those that are in the index. Returns those of which that was not known."""
        by_path = {checkpoint_path(step): step for step in steps}
        keys = [SWEEPING, f"published:{tenant}", f"artifact:{job}"]
        args = [job, "1" if kept else "", *(part for pair in by_path.items() for part in pair)]
        return {by_path[path] for path in await self._sweep(leader=leader, keys=keys, args=args)} if by_path else set()

    async def sweep_all(self, job: str, *, leader: int = UNFENCED) -> None:
        """The directory of a job that is over is to be deleted."""
        await self._sweep(leader=leader, keys=[SWEEPING, NONE, NONE], args=[job, "", "", -1])

    async def sweeping(self) -> list[str]:
        return sorted(await self._redis.smembers(SWEEPING))

    async def swept(self, name: str, *, leader: int = UNFENCED) -> None:
        """Record that checkpoints are deleted in the directory of their job."""
        await self._swept(leader=leader, keys=[SWEEPING], args=[name])

    # --- whose turn it is ----------------------------------------------------------------------------------------

    async def open(self, *jobs: str, leader: int = UNFENCED) -> None:
        """Record that jobs will leave files."""
        if jobs:
            await self._open(leader=leader, keys=["artifact:open"], args=jobs)

    async def opened(self) -> list[str]:
        return sorted(await self._redis.smembers("artifact:open"))

    async def close(self, job: str, expires: float | None, *, leader: int = UNFENCED) -> None:
        """Record that all files of a job are in the store; `expires`: until then, or for ever."""
        keys = ["artifact:open", "artifact:expiry"]
        await self._close(leader=leader, keys=keys, args=[job, "" if expires is None else expires])

    async def expired(self, now: float) -> list[str]:
        return list(await self._redis.zrangebyscore("artifact:expiry", "-inf", now))

    async def expires(self, job: str) -> float | None:
        found = await self._redis.zscore("artifact:expiry", job)
        return None if found is None else float(found)

    async def over(self, job: str, *, leader: int = UNFENCED) -> None:
        """Record that a job has no files left that could expire."""
        await self._over(leader=leader, keys=["artifact:expiry"], args=[job])

    # --- how much there is ---------------------------------------------------------------------------------------

    async def stored(self, tenant: str) -> dict[str, int]:
        """Bytes by job, the largest first."""
        return (await self.stored_by([tenant]))[tenant]

    async def stored_by(self, tenants: Sequence[str]) -> dict[str, dict[str, int]]:
        """The same of several, by tenant, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for tenant in tenants:
            pipe.zrevrange(f"stored:{tenant}", 0, -1, withscores=True)
        found = await pipe.execute()
        return {tenant: {job: int(size) for job, size in rows} for tenant, rows in zip(tenants, found, strict=True)}

    async def tenants(self) -> list[str]:
        """Return the tenants that have stored files."""
        return sorted(await self._redis.smembers("artifact:tenants"))

    # --- names ---------------------------------------------------------------------------------------------------

    async def publish(self, tenant: str, name: str, job: str, kept: ArtifactEntry, key: str) -> Publication:
        """Publish a checkpoint under a name; repeating it changes nothing. Raises Conflict if another checkpoint has
        the name, NotFound if this one has been removed since."""
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
        """Return publications by name."""
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
