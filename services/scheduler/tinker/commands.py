"""Sends commands to the trainer of a model, once each, in a form that the trainer can carry out.

send   consumes the parsed body of a request; produces COMMAND
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from opentinker.services.scheduler.tinker.access import Access, too_many
from opentinker.services.scheduler.tinker.training_data import tokens_in
from opentinker.shared.messaging.subjects import COMMAND
from opentinker.shared.state.tinker.sessions import TooManyRecords
from opentinker.shared.types import codec
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.tinker import (
    Command,
    Create,
    ForwardBackward,
    Load,
    OptimStep,
    Save,
    Skip,
    TinkerModel,
    Unload,
)

Body = Create | ForwardBackward | OptimStep | Save | Load | Unload | Skip

PUBLISH_S = 20.0
"""Then the answer is 503, and the client sends the request again."""
OVERHEAD = 1024
"""Bytes of a message that are not payload."""


async def or_skip(body: Callable[[], Awaitable[Body]]) -> Body:
    """Return the body of a command; Skip if it is refused, so that later commands of the model do not wait for it."""
    try:
        return await body()
    except (SpecError, NotFound, TooManyRecords) as error:
        return Skip(error=str(error))


class Commands:
    def __init__(self, access: Access) -> None:
        self._access, self._bus = access, access.ctx.bus

    async def send(self, model: TinkerModel, seq: int, body: Body, refused: Skip | None = None) -> dict[str, Any]:
        """Send a command, if it is not sent yet, and return the promise of its answer. `refused` goes in its place
        where it cannot be carried out now; sent again, it is the same request, carried out or refused.

        Raises Conflict for another body under a used number, TooMany, HTTPGone once the server has ended or the model
        was unloaded."""
        if model.ended and not isinstance(body, Unload):
            said = f"model {model.id} was unloaded; create a model, from one of its checkpoints if it has any"
            raise web.HTTPGone(text=said)
        job = await self._access.server(model.job)
        request, given = f"{model.id}#{seq}", refused or body
        command = Command(request=request, model=model.id, tenant=model.tenant, seq=seq, body=given)
        size, limit = len(COMMAND.encode(command)), self._bus.nc.max_payload - OVERHEAD
        if size > limit:
            error = f"the request has {size} bytes, and may have {limit}; send fewer or shorter data in one request"
            command, size = msgspec.structs.replace(command, body=Skip(error=error)), OVERHEAD
        await self._publish(job, command, _digest(body), size)
        return {"request_id": command.request, "model_id": model.id}

    async def unload(self, model: TinkerModel) -> dict[str, Any]:
        """Unload a model after the commands that it has had; the same promise again if it was unloaded. Raises TooMany,
        HTTPGone once the server has ended."""
        while True:
            try:
                promise = await self.send(model, await self._access.store.unload_number(model.id), Unload())
                break
            except Conflict:  # another command took the number
                await self._access.store.forget_unload(model.id)
        if not model.ended:
            await self._access.store.end_model(model)
        return promise

    async def _publish(self, job: JobRecord, command: Command, digest: str, size: int) -> None:
        store, body = self._access.store, command.body
        tokens = tokens_in(body) if isinstance(body, ForwardBackward) else 0
        quota, is_bounded = self._access.quota(command.tenant, job), not isinstance(body, Unload)
        with too_many("commands"):
            await store.ask(
                command.model, command.seq, digest, tokens=tokens, quota=quota, size=size, bounded=is_bounded
            )
        async with asyncio.timeout(PUBLISH_S):
            await self._bus.publish(COMMAND, command, msg_id=command.request, job=job.id)
        await store.used_model(command.model)


def _digest(body: Body) -> str:
    """A repeated save for a sampler may come with another id for it, and a checkpoint to load or to begin with may have
    been saved again or removed meanwhile. The first one stands, and is in the answer."""
    if isinstance(body, Save) and not body.name:
        body = msgspec.structs.replace(body, sampler="")
    if isinstance(body, Load):
        body = msgspec.structs.replace(body, directory="")
    if isinstance(body, Create):
        body = msgspec.structs.replace(body, start="")
    return hashlib.sha256(codec.encode(body)).hexdigest()[:24]
