"""What the Tinker API remembers, in Redis: sessions, models, samplers, checkpoints, and the answers to requests.

Redis keys:
    tinker:session:{id}         the TinkerSession as JSON
    tinker:beat:{id}            exists while the session's client sends heartbeats
    tinker:finished:{id}        how the session's client says that it ended, as JSON
    tinker:in:{id}              set of ids of the session's samplers
    tinker:sessions:{tenant}    sorted set of session ids by creation time
    tinker:model:{id}           hash: record (the TinkerModel as JSON), used (Unix seconds of its last command),
                                next (lowest number that no command has had), sampler (id of the newest without a name),
                                sampler_seq (number of the command that saved it)
    tinker:models:{tenant}      sorted set of model ids by creation time
    tinker:models:of:{job}      set of ids of the models that the job trains
    tinker:progress:{model}     the ModelProgress as JSON
    tinker:sampler:{id}         the Sampler as JSON
    tinker:sampling:{model}     sorted set of ids of samplers that hold weights of the model, by their last use
    tinker:checkpoints:{model}  hash: KIND/NAME -> the TinkerCheckpoint as JSON
    tinker:checkpointed:{tenant}  sorted set of the tenant's checkpoint paths by creation time
    tinker:expiring             sorted set of checkpoint paths by the Unix time at which they expire
    tinker:secret               what URLs of downloads are signed with

Requests for samples, answers and quotas are in `tinker_requests.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from opentinker.shared.state import tinker_scripts
from opentinker.shared.state.redis_script import Script
from opentinker.shared.state.tinker_requests import T, TinkerRequests
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.tinker import (
    ModelProgress,
    Sampler,
    TinkerCheckpoint,
    TinkerModel,
    TinkerSession,
)

Owned = TypeVar("Owned", TinkerSession, TinkerModel, Sampler, TinkerCheckpoint)

BEAT_S = 300
"""A session without heartbeats for this long has ended."""


class TinkerStore(TinkerRequests):
    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        self._change = Script(redis, tinker_scripts.CHANGE)
        self._add_checkpoint, self._add_sampler = (
            Script(redis, tinker_scripts.ADD_CHECKPOINT),
            Script(redis, tinker_scripts.ADD_SAMPLER),
        )

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

    async def finish(self, id: str, how: str) -> None:
        """Note how the client of a session ended, as JSON."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(f"tinker:finished:{id}", how)
            pipe.delete(f"tinker:beat:{id}")
            await pipe.execute()

    async def finished(self, id: str) -> str:
        """Return how the client of a session ended, as JSON; empty: it has not said that it has."""
        return str(await self._redis.get(f"tinker:finished:{id}") or "")

    async def samplers_in(self, session: str) -> list[str]:
        return sorted(await self._redis.smembers(f"tinker:in:{session}"))

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

    # --- samplers and checkpoints -------------------------------------------------------------------------------

    async def add_sampler(self, sampler: Sampler) -> None:
        """Save it; one with this id is replaced. One of a model's weights without a name is its newest from now on,
        unless a later command has saved another."""
        number = sampler.version.rpartition("@")[2]
        is_newest, model = bool(sampler.model and not sampler.path), sampler.model
        await self._add_sampler(
            keys=[f"tinker:sampler:{sampler.id}", f"tinker:in:{sampler.session}", f"tinker:model:{model}",
                  f"tinker:sampling:{model}"],
            args=[sampler.id, codec.to_json(sampler), (number if number.isdigit() else "0") if is_newest else "",
                  time.time() if model and not sampler.follows else ""],
        )  # fmt: skip

    async def used_sampler(self, sampler: Sampler) -> None:
        """Note that samples are drawn with these weights, which one that follows the model's does not hold."""
        if sampler.model and not sampler.follows:
            await self._redis.zadd(f"tinker:sampling:{sampler.model}", {sampler.id: time.time()})

    async def samplers_of(self, model: str) -> list[Sampler]:
        """Return those that hold weights of the model, the most recently used ones first, without those forgotten."""
        return await self._listed(Sampler, f"tinker:sampling:{model}", "tinker:sampler:")

    async def forget_use(self, model: str, ids: Sequence[str]) -> None:
        if ids:
            await self._redis.zrem(f"tinker:sampling:{model}", *ids)

    async def newest_of(self, sampler: Sampler) -> Sampler:
        """Return the sampler with the model's newest weights, which one that follows them samples with."""
        if not sampler.follows:
            return sampler
        id = await self._redis.hget(f"tinker:model:{sampler.model}", "sampler")
        return (await self._read(Sampler, f"tinker:sampler:{id}") if id else None) or sampler

    async def sampler(self, tenant: str, id: str) -> Sampler:
        """Raises NotFound, for a sampler of another tenant too."""
        return self._own(await self._read(Sampler, f"tinker:sampler:{id}"), tenant, f"sampler {id}")

    async def add_checkpoint(self, checkpoint: TinkerCheckpoint) -> bool:
        """Save its record; one with this name is replaced. Return False, and change nothing, if a later command has
        saved one under this name."""
        return bool(await self._add_checkpoint(
            keys=[f"tinker:checkpoints:{checkpoint.model}", f"tinker:checkpointed:{checkpoint.tenant}",
                  "tinker:expiring"],
            args=[f"{checkpoint.kind}/{checkpoint.name}", codec.to_json(checkpoint), checkpoint.seq, checkpoint.path,
                  checkpoint.created, checkpoint.expires],
        ))  # fmt: skip

    async def expired(self, now: float) -> list[TinkerCheckpoint]:
        """Return some checkpoints whose time is over."""
        found = []
        for path in await self._redis.zrangebyscore("tinker:expiring", 0, now, start=0, num=100):
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

    async def checkpoints(self, model: str) -> list[TinkerCheckpoint]:
        """Return those of a model, newest first."""
        texts = (await self._redis.hgetall(f"tinker:checkpoints:{model}")).values()
        found = [codec.from_json(TinkerCheckpoint, text) for text in texts]
        return sorted(found, key=lambda one: -one.created)

    async def checkpoint_paths(self, tenant: str) -> list[str]:
        """Return the paths of the tenant's checkpoints, newest first."""
        return list(await self._redis.zrange(f"tinker:checkpointed:{tenant}", 0, -1, desc=True))

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
        keys = (f"checkpoints:{checkpoint.model}", "expiring", f"checkpointed:{checkpoint.tenant}")
        args = (f"{checkpoint.kind}/{checkpoint.name}", text, by, checkpoint.path, str(expires))
        return bool(await self._change(keys=[f"tinker:{key}" for key in keys], args=args))

    async def secret(self) -> str:
        """Return what URLs of downloads are signed with, the same for all schedulers."""
        known = await self._redis.get("tinker:secret")
        if not known:
            await self._redis.set("tinker:secret", secrets.token_hex(32), nx=True)
            known = await self._redis.get("tinker:secret")
        return str(known)

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _listed(self, kind: type[T], index: str, prefix: str) -> list[T]:
        ids = await self._redis.zrange(index, 0, -1, desc=True)
        texts = await self._redis.mget([prefix + id for id in ids]) if ids else []
        return [codec.from_json(kind, text) for text in texts if text]

    @staticmethod
    def _own(found: Owned | None, tenant: str, name: str) -> Owned:
        if found is None or found.tenant != tenant:
            raise NotFound(f"{name} does not exist")
        return found
