"""Records of the Tinker API in Redis: models and checkpoints here, sessions and samplers in `sessions.py`, requests,
answers and quotas in `requests.py`.

Redis keys:
    tinker:model:{id}           hash: record (the TinkerModel as JSON), used (Unix seconds of its last command),
                                next (lowest number that no command has had), sampler (id of the newest without a name),
                                sampler_seq (number of the command that saved it), unload (number of the command that
                                unloads it), over (exists once its server has ended)
    tinker:live:{tenant}        set of ids of the tenant's models that were not unloaded
    tinker:models:{tenant}      sorted set of model ids by creation time
    tinker:models:of:{job}      set of ids of the models that the job trains
    tinker:progress:{model}     the ModelProgress as JSON
    tinker:checkpoints:{model}  hash: KIND/NAME -> the TinkerCheckpoint as JSON
    tinker:checkpointed:{tenant}  sorted set of the tenant's checkpoint paths by creation time
    tinker:stored               hash: tenant -> bytes of its checkpoints
    tinker:unlisted:{job}       hash: tenant -> bytes of weights that the job's trainer keeps and no checkpoint has;
                                expires
    tinker:expiring             sorted set of checkpoint paths by the Unix time at which they expire
    tinker:indexed              exists once records of earlier versions are in the indexes
    tinker:secret               what URLs of downloads are signed with
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opentinker.shared.state.redis_script import Script
from opentinker.shared.state.tinker.sessions import LEFT_S, TinkerSessions, TooManyRecords
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.tinker import (
    ModelProgress,
    TinkerCheckpoint,
    TinkerModel,
)

MAX_MODELS = 256
"""Largest number of a tenant's models that were not unloaded."""
MAX_CHECKPOINT_BYTES = 1 << 40
"""Bytes of a tenant's checkpoints at which further saves are refused, when they are sent and when their turn comes.
Those that are being written may exceed it. Weights that were replaced or have no name count as the trainer last
found them, about a minute ago."""
MAX_CHECKPOINTS = 10_000
"""A tenant's checkpoints at which saves under a new name are refused likewise."""
UNLISTED_S = 900
"""The trainer notes their bytes more often than this."""


# KEYS model, models, models of the job, live, trained, session, closing. ARGV: id, record, created, MAX_MODELS, id of
# the session
_ADD_MODEL = """
if redis.call('HEXISTS', KEYS[1], 'record') == 1 then return 1 end
if redis.call('EXISTS', KEYS[6]) == 0 or redis.call('ZSCORE', KEYS[7], ARGV[5]) then return -2 end
if redis.call('SCARD', KEYS[4]) >= tonumber(ARGV[4]) then return -1 end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'used', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('SADD', KEYS[5], ARGV[1])
return 2
"""

# KEYS model, live. ARGV: id, record
_END_MODEL = """
if redis.call('HEXISTS', KEYS[1], 'record') == 1 then redis.call('HSET', KEYS[1], 'record', ARGV[2]) end
return redis.call('SREM', KEYS[2], ARGV[1])
"""

# KEYS model. Returns the number of the command that unloads the model: the one after those it has had
_UNLOAD = """
redis.call('HSETNX', KEYS[1], 'unload', redis.call('HGET', KEYS[1], 'next') or '0')
return redis.call('HGET', KEYS[1], 'unload')
"""

# KEYS checkpoints, checkpointed, expiring, stored. ARGV: KIND/NAME, record, seq, path, created, expires, tenant, bytes
_ADD_CHECKPOINT = """
local known, bytes = redis.call('HGET', KEYS[1], ARGV[1]), tonumber(ARGV[8])
if known then
  local before = cjson.decode(known)
  if (tonumber(before.seq) or -1) > tonumber(ARGV[3]) then return 0 end
  bytes = bytes - (tonumber(before.size) or 0)
end
redis.call('HINCRBY', KEYS[4], ARGV[7], string.format('%.0f', bytes))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[4])
if tonumber(ARGV[6]) > 0 then redis.call('ZADD', KEYS[3], ARGV[6], ARGV[4]) end
return 1
"""

# KEYS checkpoints, expiring, checkpointed, stored. ARGV: KIND/NAME, stored text, new text (empty: none), path, expires
# or 0, tenant, bytes
_CHANGE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[4])
  redis.call('HINCRBY', KEYS[4], ARGV[6], -ARGV[7])
end
if tonumber(ARGV[5]) > 0 then redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
else redis.call('ZREM', KEYS[2], ARGV[4]) end
return 1
"""


class TinkerStore(TinkerSessions):
    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        self._add_model, self._unload = Script(redis, _ADD_MODEL), Script(redis, _UNLOAD)
        self._change, self._end_model = Script(redis, _CHANGE), Script(redis, _END_MODEL)
        self._add_checkpoint = Script(redis, _ADD_CHECKPOINT)

    # --- models -------------------------------------------------------------------------------------------------

    async def add_model(self, model: TinkerModel) -> None:
        """Idempotent. Raises Conflict if a model with this id and another shape exists, TooManyRecords, NotFound if its
        session has ended."""
        session = model.id.partition(":")[0]
        added = await self._add_model(
            keys=[f"tinker:model:{model.id}", f"tinker:models:{model.tenant}", f"tinker:models:of:{model.job}",
                  f"tinker:live:{model.tenant}", f"tinker:trained:{session}", f"tinker:session:{session}",
                  "tinker:closing"],
            args=[model.id, codec.to_json(model), model.created, MAX_MODELS, session],
        )  # fmt: skip
        if added == -2:
            raise NotFound(f"session {session} has ended")
        if added == -1:
            raise TooManyRecords(
                f"tenant {model.tenant} has {MAX_MODELS} models whose clients send heartbeats, or did within the last "
                f"{LEFT_S / 60:.0f} minutes; end clients that are not used, or unload models; checkpoints stay"
            )
        if added == 1:
            known = await self.model(model.tenant, model.id)
            if (known.base, known.lora, known.start) != (model.base, model.lora, model.start):
                raise Conflict(f"model {model.id} exists with other settings; open another session")

    async def live_models(self, tenant: str) -> list[str]:
        """Return ids of the tenant's models that were not unloaded."""
        return sorted(await self._redis.smembers(f"tinker:live:{tenant}"))

    async def unload_number(self, model: str) -> int:
        """Return the number of the command that unloads the model, always the same one."""
        return int(await self._unload(keys=[f"tinker:model:{model}"]))

    async def forget_unload(self, model: str) -> None:
        """Let the next call of `unload_number` choose another one: another command has it."""
        await self._redis.hdel(f"tinker:model:{model}", "unload")

    async def end_model(self, model: TinkerModel) -> None:
        """Note that the model was unloaded: it takes no further commands. One that was removed stays removed."""
        ended = codec.to_json(msgspec.structs.replace(model, ended=True))
        keys = [f"tinker:model:{model.id}", f"tinker:live:{model.tenant}"]
        await self._end_model(keys=keys, args=[model.id, ended])

    async def not_live(self, tenant: str, models: Sequence[str]) -> None:
        """Count these models no longer: their server has ended, or they were removed."""
        if models:
            await self._redis.srem(f"tinker:live:{tenant}", *models)

    async def is_unloaded(self, model: str) -> bool:
        """Return whether the command that unloads the model has had its answer."""
        number = await self._redis.hget(f"tinker:model:{model}", "unload")
        return number is None or await self.was_answered(f"{model}#{number}")

    async def remove_model(self, model: TinkerModel) -> bool:
        """Remove what is known of a model that has ended: while it has checkpoints its record stays, and its samplers.
        Return whether nothing is left. `sizes` is of earlier releases."""
        await self.release_commands(model.id)
        await self._redis.delete(*(f"tinker:{key}:{model.id}" for key in ("asked", "open", "sizes")))
        if await self._redis.exists(f"tinker:checkpoints:{model.id}"):
            return False
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(*(f"tinker:{key}:{model.id}" for key in ("model", "progress", "sampling")))
            pipe.zrem(f"tinker:models:{model.tenant}", model.id)
            pipe.srem(f"tinker:models:of:{model.job}", model.id)
            pipe.srem(f"tinker:live:{model.tenant}", model.id)
            await pipe.execute()
        return True

    async def model(self, tenant: str, id: str) -> TinkerModel:
        """Raises NotFound, for a model of another tenant too."""
        text = await self._redis.hget(f"tinker:model:{id}", "record")
        return self._own(codec.from_json(TinkerModel, text) if text else None, tenant, f"model {id}")

    async def models(self, tenant: str, offset: int, limit: int) -> tuple[list[TinkerModel], int]:
        """Return a page of the tenant's models, newest first, and how many there are."""
        ids, total = await self._page(f"tinker:models:{tenant}", offset, limit)
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hget(f"tinker:model:{id}", "record")
            texts = await pipe.execute()
        return [codec.from_json(TinkerModel, text) for text in texts if text], total

    async def tenant_of(self, model: str) -> str:
        """Return whose model it is; empty if it is not known any more."""
        text = await self._redis.hget(f"tinker:model:{model}", "record")
        return codec.from_json(TinkerModel, text).tenant if text else ""

    async def models_of(self, job: str) -> list[str]:
        return sorted(await self._redis.smembers(f"tinker:models:of:{job}"))

    async def used_model(self, id: str) -> None:
        await self._redis.hset(f"tinker:model:{id}", "used", str(time.time()))

    async def last_used(self, id: str) -> float:
        return float(await self._redis.hget(f"tinker:model:{id}", "used") or 0.0)

    async def set_progress(self, id: str, progress: ModelProgress) -> None:
        await self._redis.set(f"tinker:progress:{id}", codec.to_json(progress))

    async def progress(self, id: str) -> ModelProgress:
        """Return how the model learns; all is 0 before its first command."""
        return await self._read(ModelProgress, f"tinker:progress:{id}") or ModelProgress()

    # --- checkpoints --------------------------------------------------------------------------------------------

    async def add_checkpoint(self, checkpoint: TinkerCheckpoint) -> bool:
        """Save its record; one with this name is replaced. Return False, and change nothing, if a later command has
        saved one under this name."""
        return bool(await self._add_checkpoint(
            keys=[f"tinker:checkpoints:{checkpoint.model}", f"tinker:checkpointed:{checkpoint.tenant}",
                  "tinker:expiring", "tinker:stored"],
            args=[f"{checkpoint.kind}/{checkpoint.name}", codec.to_json(checkpoint), checkpoint.seq, checkpoint.path,
                  checkpoint.created, checkpoint.expires, checkpoint.tenant, checkpoint.size],
        ))  # fmt: skip

    async def expired(self, now: float) -> list[TinkerCheckpoint]:
        """Return some checkpoints whose time is over, if there are any."""
        found: list[TinkerCheckpoint] = []
        while not found and (paths := await self._redis.zrangebyscore("tinker:expiring", 0, now, start=0, num=100)):
            for path in paths:
                model, _, field = path.removeprefix("tinker://").partition("/")
                if text := await self._redis.hget(f"tinker:checkpoints:{model}", field):
                    found.append(codec.from_json(TinkerCheckpoint, text))
                else:
                    await self._redis.zrem("tinker:expiring", path)
        return found

    async def checkpoint(self, tenant: str, model: str, kind: str, name: str) -> TinkerCheckpoint:
        """Raises NotFound, for one of another tenant too unless it is public."""
        text = await self._redis.hget(f"tinker:checkpoints:{model}", f"{kind}/{name}")
        found = codec.from_json(TinkerCheckpoint, text) if text else None
        where = f"checkpoint tinker://{model}/{kind}/{name}"
        if found is not None and found.expires and found.expires <= time.time():
            raise NotFound(f"{where} does not exist")
        return found if found is not None and found.public else self._own(found, tenant, where)

    async def saved_as(self, model: str, kind: str, name: str) -> TinkerCheckpoint | None:
        """Return the checkpoint of this name, also one that has expired."""
        text = await self._redis.hget(f"tinker:checkpoints:{model}", f"{kind}/{name}")
        return codec.from_json(TinkerCheckpoint, text) if text else None

    async def checkpoints(self, model: str) -> list[TinkerCheckpoint]:
        """Return those of a model, newest first."""
        texts = (await self._redis.hgetall(f"tinker:checkpoints:{model}")).values()
        found = [codec.from_json(TinkerCheckpoint, text) for text in texts]
        return sorted(found, key=lambda one: -one.created)

    async def checkpoint_paths(self, tenant: str, offset: int, limit: int) -> tuple[list[str], int]:
        """Return a page of the paths of the tenant's checkpoints, newest first, and how many there are; those that have
        expired are neither in it nor counted."""
        index = f"tinker:checkpointed:{tenant}"
        expired = await self._redis.zrange("tinker:expiring", 0, time.time(), byscore=True)
        async with self._redis.pipeline(transaction=False) as pipe:
            for path in expired:
                pipe.zrevrank(index, path)
            ranks = sorted(rank for rank in await pipe.execute() if rank is not None)
        for rank in ranks:
            offset += rank <= offset
        paths, total = await self._page(index, offset, limit + len(ranks))
        return [path for path in paths if path not in set(expired)][:limit], total - len(ranks)

    async def stored_bytes(self, tenant: str) -> int:
        """Return the bytes of the tenant's checkpoints."""
        return int(await self._redis.hget("tinker:stored", tenant) or 0)

    async def set_unlisted(self, job: str, bytes_of: Mapping[str, int]) -> None:
        """Note the bytes of weights that a server keeps and that no checkpoint has, by tenant."""
        key = f"tinker:unlisted:{job}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if bytes_of:
                pipe.hset(key, mapping=dict(bytes_of))
                pipe.expire(key, UNLISTED_S)
            await pipe.execute()

    async def require_room_for_save(self, tenant: str, job: str, name: str = "", path: str = "") -> None:
        """Raises TooManyRecords if the tenant's checkpoints have as many bytes as they may have, together with the
        other weights that the server keeps, or if there are as many as there may be, without one of this `path`.
        `name` empty: weights without a name."""
        index = f"tinker:checkpointed:{tenant}"
        is_full = bool(name) and await self._redis.zcard(index) >= MAX_CHECKPOINTS
        if is_full and await self._redis.zscore(index, path) is None:
            raise TooManyRecords(
                f"checkpoint {name} cannot be saved: tenant {tenant} has {MAX_CHECKPOINTS} checkpoints, and may not "
                "have more; delete some (`tinker checkpoint delete`), or save with ttl_seconds"
            )
        stored = await self.stored_bytes(tenant)
        unlisted = int(await self._redis.hget(f"tinker:unlisted:{job}", tenant) or 0)
        if stored + unlisted < MAX_CHECKPOINT_BYTES:
            return
        what = f"checkpoint {name}" if name else "weights without a name"
        has = f"tenant {tenant} has checkpoints of {stored} bytes" + (
            f", and {unlisted} bytes of weights on {job} that were replaced or have no name" if unlisted else ""
        )
        advice = "delete some (`tinker checkpoint delete`), or save with ttl_seconds"
        if unlisted:
            advice += "; replaced weights go within an hour after their last use"
        raise TooManyRecords(f"{what} cannot be saved: {has}, and may have {MAX_CHECKPOINT_BYTES}; {advice}")

    async def remove_checkpoint(self, checkpoint: TinkerCheckpoint) -> bool:
        """Return False, and change nothing, if its record is another one by now."""
        text = await self._redis.hget(f"tinker:checkpoints:{checkpoint.model}", f"{checkpoint.kind}/{checkpoint.name}")
        if not text or codec.from_json(TinkerCheckpoint, text) != checkpoint:
            return False
        return await self._replace(checkpoint, text, "", 0.0)

    async def change_checkpoint(self, checkpoint: TinkerCheckpoint, **changes: object) -> None:
        """Change fields of a record, as it is by now: others may change it at the same time. Raises NotFound."""
        field = f"{checkpoint.kind}/{checkpoint.name}"
        while text := await self._redis.hget(f"tinker:checkpoints:{checkpoint.model}", field):
            changed = msgspec.structs.replace(codec.from_json(TinkerCheckpoint, text), **changes)
            if await self._replace(checkpoint, text, codec.to_json(changed).decode(), changed.expires):
                return
        raise NotFound(f"checkpoint {checkpoint.path} does not exist")

    async def _replace(self, checkpoint: TinkerCheckpoint, text: str, by: str, expires: float) -> bool:
        keys = (f"checkpoints:{checkpoint.model}", "expiring", f"checkpointed:{checkpoint.tenant}", "stored")
        args = (f"{checkpoint.kind}/{checkpoint.name}", text, by, checkpoint.path, str(expires), checkpoint.tenant,
                str(checkpoint.size))  # fmt: skip
        return bool(await self._change(keys=[f"tinker:{key}" for key in keys], args=args))

    async def secret(self) -> str:
        """Return what URLs of downloads are signed with, the same for all schedulers."""
        known = await self._redis.get("tinker:secret")
        if not known:
            await self._redis.set("tinker:secret", secrets.token_hex(32), nx=True)
            known = await self._redis.get("tinker:secret")
        return str(known)

    async def _page(self, index: str, offset: int, limit: int) -> tuple[list[str], int]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrange(index, offset, offset + limit - 1, desc=True)
            pipe.zcard(index)
            names, total = await pipe.execute()
        return list(names), int(total)

    # --- records of earlier versions ----------------------------------------------------------------------------

    async def complete_indexes(self) -> None:
        """Enter records of versions that had no such indexes, once: heartbeats, models that count, and the bytes of
        checkpoints."""
        redis = self._redis
        if await redis.exists("tinker:indexed"):
            return
        async for key in redis.scan_iter("tinker:sessions:*", count=1000):
            if ids := await redis.zrange(key, 0, -1):
                await redis.zadd("tinker:beats", dict.fromkeys(ids, time.time()), nx=True)
        async for key in redis.scan_iter("tinker:models:*", count=1000, _type="zset"):
            tenant = key.removeprefix("tinker:models:")
            for id in await redis.zrange(key, 0, -1):
                text = await redis.hget(f"tinker:model:{id}", "record")
                if text and await self.has_session(id) and not codec.from_json(TinkerModel, text).ended:
                    await redis.sadd(f"tinker:trained:{id.partition(':')[0]}", id)
                    await redis.sadd(f"tinker:live:{tenant}", id)
        async for key in redis.scan_iter("tinker:checkpointed:*", count=1000):
            size = 0
            for path in await redis.zrange(key, 0, -1):
                model, _, field = path.removeprefix("tinker://").partition("/")
                if text := await redis.hget(f"tinker:checkpoints:{model}", field):
                    size += codec.from_json(TinkerCheckpoint, text).size
            await redis.hset("tinker:stored", key.removeprefix("tinker:checkpointed:"), size)
        await redis.set("tinker:indexed", "1")
