"""Handlers of training runs, which are models, and of their checkpoints: lists, deletion, expiry, publication."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.tinker.access import Access, shown_base
from opentinker.services.scheduler.tinker.bodies import PathBody, TtlBody, read_body, ttl_of
from opentinker.services.scheduler.tinker.sessions_api import LIMIT, OFFSET, PROJECT, SCOPE, refuse_project, when
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import TinkerCheckpoint, TinkerModel

JSON = "application/json"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
CHECKPOINT = "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}"


class RunsApi:
    def __init__(self, access: Access) -> None:
        self._access, self._store = access, access.store

    @Route("GET", "/api/v1/training_runs", Action.JOBS_READ, parameters=(LIMIT, OFFSET, SCOPE, PROJECT))
    async def runs(self, request: web.Request) -> web.Response:
        """List the tenant's models, the newest first (Tinker)."""
        refuse_project(request)
        offset, limit = OFFSET.read(request), LIMIT.read(request)
        page, total = await self._store.models(tenant_of(request), offset, limit)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return json_response({"training_runs": [await self._run(one) for one in page], "cursor": cursor})

    @Route("GET", "/api/v1/training_runs/{model}", Action.JOBS_READ, parameters=(SCOPE,))
    async def run(self, request: web.Request) -> web.Response:
        """Get a model (Tinker)."""
        return json_response(await self._run(await self._access.model(request, request.match_info["model"])))

    async def _run(self, model: TinkerModel) -> dict[str, Any]:
        saved = await self._checkpoints(model.id)
        newest = {kind: next((one for one in saved if one.kind == kind), None) for kind in TYPES}
        training, sampler = newest["weights"], newest["sampler_weights"]
        return {
            "training_run_id": model.id,
            "base_model": shown_base(model.base),
            "model_owner": model.tenant,
            "is_lora": not model.lora.is_full,
            "corrupted": False,
            "lora_rank": model.lora.rank or None,
            "last_request_time": when(await self._store.last_used(model.id) or model.created),
            "last_checkpoint": None if training is None else shown(training),
            "last_sampler_checkpoint": None if sampler is None else shown(sampler),
            "user_metadata": model.metadata or None,
        }

    async def _checkpoints(self, model: str) -> list[TinkerCheckpoint]:
        """Return those that have not expired, the newest first."""
        now = time.time()
        return [one for one in await self._store.checkpoints(model) if not one.expires or one.expires > now]

    @Route("GET", "/api/v1/training_runs/{model}/checkpoints", Action.JOBS_READ, parameters=(SCOPE,))
    async def checkpoints_of(self, request: web.Request) -> web.Response:
        """List a model's checkpoints, the newest first (Tinker)."""
        model = await self._access.model(request, request.match_info["model"])
        return json_response({"checkpoints": [shown(one) for one in await self._checkpoints(model.id)]})

    @Route("GET", "/api/v1/checkpoints", Action.JOBS_READ, parameters=(LIMIT, OFFSET, SCOPE))
    async def checkpoints(self, request: web.Request) -> web.Response:
        """List the tenant's checkpoints, the newest first (Tinker)."""
        offset, limit = OFFSET.read(request), LIMIT.read(request)
        page, total = await self._store.checkpoint_paths(tenant_of(request), offset, limit)
        found = []
        for path in page:
            try:
                found.append(shown(await self._access.checkpoint(request, path)))
            except NotFound:  # it has expired
                continue
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return json_response({"checkpoints": found, "cursor": cursor})

    @Route("POST", "/api/v1/weights_info", Action.JOBS_READ, takes=JSON)
    async def weights_info(self, request: web.Request) -> web.Response:
        """Get base and shape of a checkpoint, one's own or a public one (Tinker)."""
        found = await self._access.checkpoint(request, (await read_body(request, PathBody)).tinker_path)
        return json_response(
            {
                "base_model": shown_base(found.base),
                # The SDK asserts it before it creates a model from the checkpoint, with this rank: 0 is all weights.
                "is_lora": True,
                "lora_rank": found.lora.rank,
                "train_unembed": found.lora.is_full,
                "train_mlp": found.lora.train_mlp,
                "train_attn": found.lora.train_attn,
            }
        )

    @Route("DELETE", CHECKPOINT, Action.CHECKPOINTS_WRITE)
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a checkpoint (Tinker)."""
        while not await self._access.remove(await self._access.own_checkpoint(request)):
            pass  # it was changed since it was read: read it again
        return json_response({})

    @Route("PUT", f"{CHECKPOINT}/ttl", Action.CHECKPOINTS_WRITE, takes=JSON)
    async def ttl(self, request: web.Request) -> web.Response:
        """Set when a checkpoint expires, from now (Tinker)."""
        found = await self._access.own_checkpoint(request)
        ttl_s = ttl_of((await read_body(request, TtlBody)).ttl_seconds)
        expires = time.time() + ttl_s if ttl_s else 0.0
        await self._store.change_checkpoint(found, expires=expires)
        return json_response({})

    @Route("POST", f"{CHECKPOINT}/publish", Action.CHECKPOINTS_WRITE)
    async def publish(self, request: web.Request) -> web.Response:
        """Let every tenant load, sample and download a checkpoint (Tinker)."""
        await self._store.change_checkpoint(await self._access.own_checkpoint(request), public=True)
        return json_response({})

    @Route("DELETE", f"{CHECKPOINT}/publish", Action.CHECKPOINTS_WRITE)
    async def unpublish(self, request: web.Request) -> web.Response:
        """Keep a checkpoint to its tenant again (Tinker)."""
        await self._store.change_checkpoint(await self._access.own_checkpoint(request), public=False)
        return json_response({})


def shown(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    """Return a checkpoint as clients read it."""
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": when(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": checkpoint.public,
        "user_metadata": checkpoint.metadata or None,
        "expires_at": when(checkpoint.expires) if checkpoint.expires else None,
    }
