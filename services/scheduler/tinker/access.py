"""Looks up what a request of the Tinker API names, for the tenant that asks: servers, sessions, models, samplers,
checkpoints. What is another tenant's looks like what does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import TooMany
from opentinker.services.scheduler.jobs.check_model import resolved_base
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.services.scheduler.tinker.ended_servers import remove_files, remove_unlisted
from opentinker.shared.runtime.service import Context
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.spec.tinker import KIND, TinkerSpec
from opentinker.shared.state.tinker.held_bytes import TooManyWaiting
from opentinker.shared.state.tinker.requests import Quota, TokensSpent
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import NotFound, SpecError
from opentinker.shared.types.tinker import (
    Sampler,
    TinkerCheckpoint,
    TinkerModel,
    TinkerSession,
    tinker_place,
)

FRESH_S = 1.0
"""So old may the state of a Tinker server be."""
LONGEST_PATH = 4096
ADAPTERS_ALONE = (
    "has a server here that trains adapters: pass a lora_config with a rank above 0, or start a server whose clients "
    "train all weights (kind = 'tinker', tinker.full_weights = true)"
)
FULL_ALONE = (
    "has a server here that trains all weights: create the model with rank 0, or start a server for adapters (kind = "
    "'tinker')"
)
ID = re.compile(r"s-[0-9a-f]{20}(:(train|sampler):[0-9]{1,16})?")
"""Ids of sessions, models and samplers."""
PATH = re.compile(
    r"tinker://([^/]{1,100})/(weights|sampler_weights|external_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})"
)


@contextlib.contextmanager
def too_many(what: str) -> Iterator[None]:
    """Turn a reached bound into TooMany, which makes the client wait and send the request again."""
    try:
        yield
    except TooManyWaiting as error:
        raise TooMany(f"{what}: {error}", 1.0) from None
    except TokensSpent as error:
        raise TooMany(f"tokens: {error}", 60 - time.time() % 60) from None


class Access:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.store = ctx, TinkerStore(ctx.store.redis)
        self._jobs = SingleFlight[JobRecord](FRESH_S)

    # --- Tinker servers ---------------------------------------------------------------------------------------------

    async def servers(self, request: web.Request) -> list[JobRecord]:
        """Return the running jobs whose models the tenant may train, its own jobs first."""
        tenant = tenant_of(request)
        jobs = [job for job in await self.ctx.store.active_jobs() if job.kind == KIND]
        found = [job for job in jobs if settings_of(job).allows(job.tenant, tenant)]
        return sorted(found, key=lambda job: (job.tenant != tenant, job.created))

    async def server_for(self, request: web.Request, base: str, *, full: bool | None = None) -> JobRecord:
        """Return a Tinker server for this base; `full`: one whose clients train all weights, or adapters; None: any.
        Raises NotFound, SpecError."""
        found = await self._servers_of(request, base)
        for job in found:
            if full is None or settings_of(job).full_weights == full:
                return job
        raise SpecError.of("base_model", base[:200], ADAPTERS_ALONE if full else FULL_ALONE)

    async def _servers_of(self, request: web.Request, base: str) -> list[JobRecord]:
        """Return the Tinker servers that a client means by this base. Raises NotFound."""
        servers = await self.servers(request)
        if found := [job for job in servers if base in (base_of(job), shown_base(base_of(job)), job.id)]:
            return found
        where = await self.resolved(base) if servers else base
        if found := [job for job in servers if where == base_of(job) or base == job.name]:
            return found
        bases = sorted({shown_base(base_of(job)) for job in servers})
        served = f"served are {', '.join(bases)}" if bases else "start one with `opentinker submit` and kind = 'tinker'"
        raise NotFound(f"no Tinker server for base_model {base[:200]!r} is running that you may use; {served}")

    async def is_base(self, request: web.Request, name: str, base: str) -> bool:
        """Return whether a client that gives this name as base_model means the base, or a server of it."""
        if await self.resolved(name) == base:
            return True
        jobs = [job for job in await self.servers(request) if base_of(job) == base]
        return any(name in (job.name, job.id) for job in jobs)

    async def resolved(self, base: str) -> str:
        """Return the base as specs have it, for one that a client names as specs may: a directory or an id of a hub."""
        return base if len(base) > LONGEST_PATH else await on_disk(self.ctx, resolved_base, base)

    async def server(self, id: str) -> JobRecord:
        """Return the server of a model or sampler. Raises HTTPGone once it has ended."""
        job = await self.server_or_ended(id)
        if job.state.final:
            said = f"the Tinker server {id} has {job.state}; load a checkpoint of the model to continue on another one"
            raise web.HTTPGone(text=said)
        return job

    async def server_or_ended(self, id: str) -> JobRecord:
        """Return the job, as it was within the last second."""
        return await self._jobs.get(id, partial(self.ctx.store.job, id))

    def quota(self, tenant: str, job: JobRecord) -> Quota:
        """Return what counts the tokens of the tenant's requests of this minute."""
        limit = settings_of(job).tokens_per_minute
        return Quota(job=job.id, tenant=tenant, minute=int(time.time() // 60), limit=limit)

    async def forget_ended_servers(self, tenant: str) -> None:
        """Count the tenant's models no longer whose servers have ended."""
        gone = []
        for id in await self.store.live_models(tenant):
            try:
                model = await self.store.model(tenant, id)
            except NotFound:
                gone.append(id)
                continue
            if (await self.server_or_ended(model.job)).state.final:
                gone.append(id)
        await self.store.not_live(tenant, gone)

    # --- of the tenant --------------------------------------------------------------------------------------------

    async def session(self, request: web.Request, id: str) -> TinkerSession:
        """Raises NotFound."""
        return await self.store.session(tenant_of(request), _known("session", id))

    async def model(self, request: web.Request, id: str) -> TinkerModel:
        """Raises NotFound."""
        return await self.store.model(tenant_of(request), _known("model", id))

    async def sampler(self, request: web.Request, id: str) -> Sampler:
        """Raises NotFound."""
        return await self.store.sampler(tenant_of(request), _known("sampler", id))

    async def checkpoint(self, request: web.Request, path: str) -> TinkerCheckpoint:
        """Return the checkpoint of a tinker:// path, one's own or a public one. Raises NotFound, SpecError."""
        match = PATH.fullmatch(path)
        if match is None:
            problem = "must be tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
            raise SpecError.of("path", path[:200], problem)
        return await self.store.checkpoint(tenant_of(request), *match.groups())

    async def own_checkpoint(self, request: web.Request) -> TinkerCheckpoint:
        """Return the tenant's own checkpoint that a path of the API names. Raises NotFound."""
        names = request.match_info
        found = await self.store.checkpoint(tenant_of(request), names["model"], names["kind"], names["name"])
        if found.tenant != tenant_of(request):
            raise NotFound(f"checkpoint {found.path} does not exist")
        return found

    def directory(self, checkpoint: TinkerCheckpoint) -> Path:
        return tinker_place(self.ctx.settings.data_dir, checkpoint.model) / checkpoint.kind / checkpoint.place

    async def remove(self, checkpoint: TinkerCheckpoint) -> bool:
        """Forget a checkpoint, then delete its files. Return False, and do nothing, if it has changed since it was
        read: it may have been saved again under its name."""
        if not await self.store.remove_checkpoint(checkpoint):
            return False
        await asyncio.to_thread(shutil.rmtree, self.directory(checkpoint), ignore_errors=True)
        with contextlib.suppress(NotFound):
            model = await self.store.model(checkpoint.tenant, checkpoint.model)
            if model.ended and not await self.store.has_session(model.id):
                await self.forget_model(model)
        return True

    async def forget_model(self, model: TinkerModel) -> None:
        """Remove the files of a model that has ended, except its checkpoints, and its record if it has none. While its
        server runs, that one removes the weights that were replaced: samplers may use them."""
        if not model.ended:
            await self.store.end_model(model)
        place = tinker_place(self.ctx.settings.data_dir, model.id)
        nothing_left = await self.store.remove_model(model)
        await asyncio.to_thread(remove_files, [place] if nothing_left else [place / "state", place / "samplers"])
        if not nothing_left and (await self.server_or_ended(model.job)).state.final:
            await remove_unlisted(self.store, place, model.id)


def _known(kind: str, id: str) -> str:
    """Raises NotFound for what is no id; keys of Redis and subjects are made of them."""
    if not ID.fullmatch(id):
        raise NotFound(f"{kind} {id[:100]} does not exist")
    return id


def settings_of(job: JobRecord) -> TinkerSpec:
    return TinkerSpec.model_validate(job.spec.get("tinker") or {})


def base_of(job: JobRecord) -> str:
    return str(job.spec["model"]["base"])


def shown_base(base: str) -> str:
    """Return the name of a base for clients: a directory below the server's own begins there, `Qwen/Qwen3-8B`; with a
    dot if it has two slashes, which clients would read as organization, model and variant."""
    path = PurePath(base)
    if not path.is_relative_to(here := Path.cwd()) or path == here:
        return base
    name = str(path.relative_to(here))
    return f"./{name}" if name.count("/") == 2 else name


def context_of(job: JobRecord) -> int | None:
    """Tokens of a sequence, prompt and sample together; None: the base's own limit."""
    length = job.spec["rollout"].get("context_length")
    return None if length is None else int(length)
