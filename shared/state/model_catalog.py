"""Lists the models of a Tinker server with what Redis knows of each: for people, where `TinkerStore` is for clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from opentinker.shared.state.tinker import TinkerStore
from opentinker.shared.types import codec
from opentinker.shared.types.tinker import ModelProgress, TinkerCheckpoint, TinkerModel


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    model: TinkerModel
    used: float
    """Unix seconds of its last command, or of its creation."""
    asked: int
    """Commands that its client has sent."""
    answered: int
    """The first so many of them have an answer."""

    @property
    def session(self) -> str:
        return self.model.id.partition(":")[0]

    @property
    def waiting(self) -> int:
        """Commands without an answer."""
        return max(0, self.asked - self.answered)


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    progress: ModelProgress
    checkpoints: list[TinkerCheckpoint]
    """Newest first."""
    has_next: bool
    """Whether the first command without an answer has come."""


class ModelCatalog:
    def __init__(self, redis: Any) -> None:
        self._redis, self._store = redis, TinkerStore(redis)

    async def of(self, job: str) -> list[ListedModel]:
        """Return all models of a server, the last used first."""
        ids = await self._store.models_of(job)
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hmget(f"tinker:model:{id}", "record", "used", "answered")
                pipe.hlen(f"tinker:asked:{id}")
            found = await pipe.execute()
        listed = []
        for (record, used, answered), asked in zip(found[::2], found[1::2], strict=True):
            if record:
                model = codec.from_json(TinkerModel, record)
                at = float(used or model.created)
                listed.append(ListedModel(model=model, used=at, asked=int(asked), answered=int(answered or 0)))
        return sorted(listed, key=lambda one: (-one.used, one.model.id))

    async def alive(self, sessions: Collection[str]) -> set[str]:
        """Return those of these sessions whose clients send heartbeats."""
        names = sorted(set(sessions))
        beats = await self._redis.mget([f"tinker:beat:{name}" for name in names]) if names else []
        return {name for name, beat in zip(names, beats, strict=True) if beat}

    async def details(self, models: Sequence[ListedModel]) -> list[ModelDetails]:
        """Return how each of these models learns, what it has saved, and whether its next command has come."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for one in models:
                pipe.get(f"tinker:progress:{one.model.id}")
                pipe.hvals(f"tinker:checkpoints:{one.model.id}")
                pipe.hexists(f"tinker:asked:{one.model.id}", str(one.answered))
            found = await pipe.execute()
        return [
            ModelDetails(
                progress=codec.from_json(ModelProgress, progress) if progress else ModelProgress(),
                checkpoints=sorted(
                    (codec.from_json(TinkerCheckpoint, one) for one in saved), key=lambda one: -one.created
                ),
                has_next=bool(has_next),
            )
            for progress, saved, has_next in zip(found[::3], found[1::3], found[2::3], strict=True)
        ]
