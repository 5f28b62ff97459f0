"""Lists the models of a Tinker server with what Redis knows of each: for people, where `TinkerStore` is for clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types import codec
from opentinker.shared.types.tinker import ModelProgress, TinkerCheckpoint, TinkerModel


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    model: TinkerModel
    used: float
    """Unix seconds of its last command, or of its creation."""
    waiting: int
    """Commands that have had no answer yet."""
    next: int
    """Lowest number that no command has had."""
    has_next: bool
    """Whether the trainer has what it needs for one of the waiting commands."""

    @property
    def session(self) -> str:
        return self.model.id.partition(":")[0]


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    progress: ModelProgress
    checkpoints: list[TinkerCheckpoint]
    """Newest first."""


class ModelCatalog:
    def __init__(self, redis: Any) -> None:
        self._redis, self._store = redis, TinkerStore(redis)

    async def of(self, job: str) -> list[ListedModel]:
        """Return all models of a server, the last used first."""
        ids = await self._store.models_of(job)
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hmget(f"tinker:model:{id}", "record", "used", "next")
                pipe.zcard(f"tinker:open:{id}")
                pipe.zrange(f"tinker:open:{id}", 0, 0)
            found = await pipe.execute()
        listed = []
        for (record, used, next), waiting, lowest in zip(*(found[n::3] for n in range(3)), strict=True):
            if record:
                model, missing = codec.from_json(TinkerModel, record), int(next or 0)
                listed.append(ListedModel(
                    model=model, used=float(used or model.created), waiting=int(waiting),
                    next=missing, has_next=bool(lowest) and int(lowest[0]) < missing,
                ))  # fmt: skip
        return sorted(listed, key=lambda one: (-one.used, one.model.id))

    async def alive(self, sessions: Collection[str]) -> set[str]:
        """Return those of these sessions whose clients send heartbeats."""
        names = sorted(set(sessions))
        beats = await self._redis.mget([f"tinker:beat:{name}" for name in names]) if names else []
        return {name for name, beat in zip(names, beats, strict=True) if beat}

    async def details(self, models: Sequence[ListedModel]) -> list[ModelDetails]:
        """Return how each of these models learns, and what it has saved."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for one in models:
                pipe.get(f"tinker:progress:{one.model.id}")
                pipe.hvals(f"tinker:checkpoints:{one.model.id}")
            found = await pipe.execute()
        return [
            ModelDetails(
                progress=codec.from_json(ModelProgress, progress) if progress else ModelProgress(),
                checkpoints=sorted(
                    (codec.from_json(TinkerCheckpoint, one) for one in saved), key=lambda one: -one.created
                ),
            )
            for progress, saved in zip(found[::2], found[1::2], strict=True)
        ]
