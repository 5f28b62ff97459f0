"""What the Tinker API remembers, in Redis: sessions, models, samplers, checkpoints, and the answers to requests.

Redis keys:
    tinker:session:{id}         the TinkerSession as JSON
    tinker:beat:{id}            exists while the session's client sends heartbeats
    tinker:sessions:{tenant}    sorted set of session ids by creation time
    tinker:model:{id}           hash: record (the TinkerModel as JSON), used (Unix seconds of its last command)
    tinker:models:{tenant}      sorted set of model ids by creation time
    tinker:models:of:{job}      set of ids of the models that the job trains
    tinker:progress:{model}     the ModelProgress as JSON
    tinker:asked:{model}        hash: number of a command -> digest of its body
    tinker:sampler:{id}         the Sampler as JSON
    tinker:checkpoints:{model}  hash: KIND/NAME -> the TinkerCheckpoint as JSON
    tinker:checkpointed:{tenant}  sorted set of the tenant's checkpoint paths by creation time
    tinker:answer:{request}     the Answer as JSON; expires
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.tinker import (
    ANSWER_KEPT_S,
    Answer,
    ModelProgress,
    Sampler,
    TinkerCheckpoint,
    TinkerModel,
    TinkerSession,
)

T = TypeVar("T")
Owned = TypeVar("Owned", TinkerSession, TinkerModel, Sampler, TinkerCheckpoint)

BEAT_S = 300
"""A session without heartbeats for this long has ended."""

# KEYS asked. ARGV: number, digest
_ASK = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and known ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


class TinkerStore:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._ask = Script(redis, _ASK)

    # --- sessions -----------------------------------------------------------------------------------------------

    async def open_session(self, session: TinkerSession) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(f"tinker:session:{session.id}", codec.to_json(session))
            pipe.set(f"tinker:beat:{session.id}", "1", ex=BEAT_S)
            pipe.zadd(f"tinker:sessions:{session.tenant}", {session.id: session.created})
            await pipe.execute()

    async def session(self, tenant: str, id: str) -> TinkerSession:
        """Raises NotFound, for a session of another tenant too."""
        return self._own(await self._read(TinkerSession, f"tinker:session:{id}"), tenant, f"session {id}")

    async def beat(self, id: str) -> None:
        await self._redis.set(f"tinker:beat:{id}", "1", ex=BEAT_S)

    async def is_alive(self, id: str) -> bool:
        return bool(await self._redis.exists(f"tinker:beat:{id}"))

    async def sessions(self, tenant: str) -> list[TinkerSession]:
        """Return the tenant's sessions, newest first."""
        return await self._listed(TinkerSession, f"tinker:sessions:{tenant}", "tinker:session:")

    # --- models -------------------------------------------------------------------------------------------------

    async def add_model(self, model: TinkerModel) -> None:
        """Idempotent. Raises Conflict if a model with this id and another shape exists."""
        text = codec.to_json(model).decode()
        if not await self._redis.hsetnx(f"tinker:model:{model.id}", "record", text):
            known = await self.model(model.tenant, model.id)
            if (known.base, known.lora, known.start) != (model.base, model.lora, model.start):
                raise Conflict(f"model {model.id} exists with other settings; open another session")
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(f"tinker:model:{model.id}", "used", str(model.created))
            pipe.zadd(f"tinker:models:{model.tenant}", {model.id: model.created}, nx=True)
            pipe.sadd(f"tinker:models:of:{model.job}", model.id)
            await pipe.execute()

    async def model(self, tenant: str, id: str) -> TinkerModel:
        """Raises NotFound, for a model of another tenant too."""
        text = await self._redis.hget(f"tinker:model:{id}", "record")
        return self._own(codec.from_json(TinkerModel, text) if text else None, tenant, f"model {id}")

    async def models(self, tenant: str) -> list[TinkerModel]:
        """Return the tenant's models, newest first."""
        ids = await self._redis.zrange(f"tinker:models:{tenant}", 0, -1, desc=True)
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hget(f"tinker:model:{id}", "record")
            texts = await pipe.execute()
        return [codec.from_json(TinkerModel, text) for text in texts if text]

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

    async def ask(self, model: str, seq: int, digest: str) -> None:
        """Note the body of a command. Raises Conflict if this number was used with another body."""
        if not await self._ask(keys=[f"tinker:asked:{model}"], args=[str(seq), digest]):
            raise Conflict(f"seq_id {seq} of model {model} was used for another request")

    # --- samplers and checkpoints -------------------------------------------------------------------------------

    async def add_sampler(self, sampler: Sampler) -> None:
        """Save it; one with this id is replaced."""
        await self._redis.set(f"tinker:sampler:{sampler.id}", codec.to_json(sampler))

    async def sampler(self, tenant: str, id: str) -> Sampler:
        """Raises NotFound, for a sampler of another tenant too."""
        return self._own(await self._read(Sampler, f"tinker:sampler:{id}"), tenant, f"sampler {id}")

    async def add_checkpoint(self, checkpoint: TinkerCheckpoint) -> None:
        """Save its record; one with this name is replaced."""
        field = f"{checkpoint.kind}/{checkpoint.name}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(f"tinker:checkpoints:{checkpoint.model}", field, codec.to_json(checkpoint).decode())
            pipe.zadd(f"tinker:checkpointed:{checkpoint.tenant}", {checkpoint.path: checkpoint.created})
            await pipe.execute()

    async def checkpoint(self, tenant: str, model: str, kind: str, name: str) -> TinkerCheckpoint:
        """Raises NotFound, for one of another tenant too unless it is public."""
        text = await self._redis.hget(f"tinker:checkpoints:{model}", f"{kind}/{name}")
        found = codec.from_json(TinkerCheckpoint, text) if text else None
        where = f"checkpoint tinker://{model}/{kind}/{name}"
        if found is not None and found.expires and found.expires <= time.time():
            raise NotFound(f"{where} does not exist")
        return found if found is not None and found.public else self._own(found, tenant, where)

    async def checkpoints(self, model: str) -> list[TinkerCheckpoint]:
        """Return those of a model, newest first."""
        texts = (await self._redis.hgetall(f"tinker:checkpoints:{model}")).values()
        found = [codec.from_json(TinkerCheckpoint, text) for text in texts]
        return sorted(found, key=lambda one: -one.created)

    async def checkpoint_paths(self, tenant: str) -> list[str]:
        """Return the paths of the tenant's checkpoints, newest first."""
        return list(await self._redis.zrange(f"tinker:checkpointed:{tenant}", 0, -1, desc=True))

    async def remove_checkpoint(self, checkpoint: TinkerCheckpoint) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(f"tinker:checkpoints:{checkpoint.model}", f"{checkpoint.kind}/{checkpoint.name}")
            pipe.zrem(f"tinker:checkpointed:{checkpoint.tenant}", checkpoint.path)
            await pipe.execute()

    # --- answers ------------------------------------------------------------------------------------------------

    async def answer(self, answer: Answer) -> bool:
        """Keep an answer. Return False, and change nothing, if the request has one."""
        key = f"tinker:answer:{answer.request}"
        return bool(await self._redis.set(key, codec.to_json(answer), ex=ANSWER_KEPT_S, nx=True))

    async def answered(self, request: str) -> Answer | None:
        return await self._read(Answer, f"tinker:answer:{request}")

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _read(self, kind: type[T], key: str) -> T | None:
        text = await self._redis.get(key)
        return codec.from_json(kind, text) if text else None

    async def _listed(self, kind: type[T], index: str, prefix: str) -> list[T]:
        ids = await self._redis.zrange(index, 0, -1, desc=True)
        texts = await self._redis.mget([prefix + id for id in ids]) if ids else []
        return [codec.from_json(kind, text) for text in texts if text]

    @staticmethod
    def _own(found: Owned | None, tenant: str, name: str) -> Owned:
        if found is None or found.tenant != tenant:
            raise NotFound(f"{name} does not exist")
        return found
