"""Tinker servers and the models of their clients, as gateway and trainer leave them in Redis."""

from __future__ import annotations

import time
from typing import Any

from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import LoraShape, TinkerCheckpoint, TinkerModel, TinkerSession

JOB = "j-tinker0000"


async def server(store: Store, *, tenant: str = "default", **tinker: Any) -> str:
    """A job that serves the Tinker API; `tinker`: its settings in [tinker]."""
    data = {"name": "server", "kind": "tinker", "model": {"base": "some/model"}, "tinker": tinker}
    return await store.create_job(id=JOB, spec=parse_spec(data).model_dump(mode="json"), tenant=tenant)


async def model_of(store: Store, tenant: str, session: str) -> TinkerModel:
    """A model on that server, the first of a session whose client is alive."""
    tinker, now = TinkerStore(store.redis), time.time()
    await tinker.open_session(TinkerSession(id=session, tenant=tenant, created=now))
    model = TinkerModel(
        id=f"{session}:train:0",
        tenant=tenant,
        job=JOB,
        base="some/model",
        lora=LoraShape(rank=16),
        created=now,
        metadata={"recipe": "digits"},
    )
    await tinker.add_model(model)
    return model


def saved(model: TinkerModel, name: str, **changes: Any) -> TinkerCheckpoint:
    shape = {"model": model.id, "tenant": model.tenant, "base": model.base, "lora": model.lora}
    return TinkerCheckpoint(
        **{**shape, "kind": "weights", "name": name, "created": 1.0, "size": 5, "step": 3, **changes}
    )


async def send(store: Store, model: TinkerModel, *numbers: int) -> None:
    """Commands of the model's client that have no answer yet."""
    for number in numbers:
        await TinkerStore(store.redis).ask(model.id, number, "digest")
