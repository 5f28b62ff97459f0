"""Handlers of /v1/environments: uploaded environments come in, are listed, and go.

A pushed package is tried before it becomes a version: an env worker builds its virtual environment and imports its
class in a sandbox. If none answers in time the version is kept unchecked, which the answer states.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import msgspec
import orjson
from aiohttp import web

from opentinker.services.scheduler.environments.unpack import MIB
from opentinker.services.scheduler.environments.upload import Uploads, Version
from opentinker.services.scheduler.http.auth import principal_of, tenant_of
from opentinker.services.scheduler.http.errors import body_read, json_response
from opentinker.services.scheduler.http.route_decorator import Integer, Parameter, Route
from opentinker.services.scheduler.jobs.check_environment import ask, describe
from opentinker.shared import api_types
from opentinker.shared.data import uploads
from opentinker.shared.data.uploads import Reference
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec.built_in_environments import SUMMARIES
from opentinker.shared.state.check_reports import CheckReports
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import Pool
from opentinker.shared.types.env_protocol import SERVED, EnvCheck
from opentinker.shared.types.errors import Conflict, SpecError

TAR_OVERHEAD = 4 * MIB
"""Headers and padding of a tar with the most files, and more."""

LONGEST_NAME = 400
NOT_MODULES = (uploads.PREFIX, SERVED)
HEARD_OUT = 16
AT_ONCE = 2
"""Packages that are unpacked at the same time: each takes a process (unpack.py)."""

NAME = Parameter("name", "Name of the environment; default: the name in the package.")
NAMED = Parameter("name", "As in a job: a name of the system, module:Class, NAME@VERSION, or served:NAME.")
VERSION = Integer("version", "Only this version; default: all versions.", default=0, low=1, high=10**9 - 1)


class EnvironmentsApi:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._uploads = Uploads.of(ctx.settings)
        self._checks = CheckReports(ctx.store.redis)
        self._sweeps = SweepStore(ctx.store.redis)
        self._unpacking = asyncio.Semaphore(AT_ONCE)

    @Route(
        "POST",
        "/v1/environments",
        Action.ENVIRONMENTS_WRITE,
        status=201,
        parameters=(NAME,),
        takes="application/x-tar",
        answer=api_types.PushedEnvironment,
    )
    async def push(self, request: web.Request) -> web.Response:
        """Upload an environment."""
        name = request.query.get("name", "")
        tenant = tenant_of(request)
        with await asyncio.to_thread(self._uploads.incoming) as file:
            await self._receive(request, file)
            await asyncio.to_thread(file.seek, 0)
            used = await self._used()
            async with self._unpacking:
                package, version, new = await asyncio.to_thread(self._uploads.store, file, tenant, name, used)
        reference = Reference(package.name, version.version, version.digest)
        reply = await ask(self.ctx, EnvCheck(name=str(reference), config=None, isolation="sandbox"), tenant)
        mistakes, checked = reply.errors if reply is not None else [], reply is not None
        if new and not mistakes:
            try:
                await asyncio.to_thread(self._uploads.fit, tenant, await self._used())
            except SpecError as error:  # with its virtual environment it is too much
                mistakes = error.mistakes
        if mistakes:
            if new:
                await asyncio.to_thread(self._uploads.delete, tenant, package.name, version.version)
            raise SpecError(mistakes)
        answer = {
            "name": package.name,
            "environment": str(reference),
            **_shown(version),
            "new": new,
            "checked": checked,
        }
        return json_response(answer, 201, {"Location": f"/v1/environments/{package.name}"})

    async def _used(self) -> set[str]:
        """Digests of the packages that jobs play which are not over, and those of sweeps that are still to come."""
        names = [str(job.spec.get("environment", {}).get("name", "")) for job in await self.ctx.store.active_jobs()]
        names += [name for uses in (await self._sweeps.active_uses()).values() for name in uses]
        return {uploads.parse(name).digest for name in names if uploads.is_upload(name)}

    async def _receive(self, request: web.Request, file: Any) -> None:
        """Raises SpecError for a body that no package can have."""
        most, size = self.ctx.settings.upload_mb * MIB + TAR_OVERHEAD, 0
        said, digest = _said_digest(request), hashlib.sha256()
        while chunk := await _part(request):
            size += len(chunk)
            digest.update(chunk)
            if size <= most:
                await asyncio.to_thread(file.write, chunk)
            elif (
                size > HEARD_OUT * most
            ):  # who sends little more than that is heard out, and then reads why it is refused
                break
        if size > most:
            problem = f"is larger than the limit of {self.ctx.settings.upload_mb} MB (upload_mb)"
            raise SpecError.of("(package)", None, problem)
        if said is not None and said != digest.digest():
            sent = request.headers["Content-Digest"][:100]
            raise SpecError.of("Content-Digest", sent, "does not match the received content; send it again")

    @Route("GET", "/v1/environments", Action.ENVIRONMENTS_READ, answer=api_types.Environments)
    async def list(self, request: web.Request) -> web.Response:
        """List your environments with their latest versions."""
        pushed = await asyncio.to_thread(self._uploads.names, tenant_of(request))
        newest = [{"name": name, **_shown(found[-1]), "versions": len(found)} for name, found in pushed.items()]
        offers = [w.detail.get("environments", []) for w in await self.ctx.store.workers() if w.pool == Pool.ENV]
        names = sorted({name for offer in offers for name in offer})
        summaries = {name: SUMMARIES[name] for name in names if name in SUMMARIES}
        return json_response({"environments": newest, "built_in": names, "summaries": summaries})

    @Route(
        "GET",
        "/v1/environment",
        Action.ENVIRONMENTS_READ,
        parameters=(NAMED,),
        answer=api_types.EnvironmentDescription,
    )
    async def about(self, request: web.Request) -> web.Response:
        """Get the documentation, the settings and an example episode of an environment.

        An env worker imports it for this. The example is that of your newest saved check, else the one that a built-in
        environment comes with."""
        name = request.query.get("name", "")
        if not 0 < len(name) <= LONGEST_NAME:
            raise SpecError.of("name", name[:100] or None, f"must have 1 to {LONGEST_NAME} characters")
        if ":" in name and not name.startswith(NOT_MODULES) and Action.JOBS_WRITE not in principal_of(request).may:
            raise web.HTTPForbidden(text=f"{name!r} is imported to be described, which takes {Action.JOBS_WRITE}")
        found = await describe(self.ctx, name, tenant_of(request))
        example = await self._checked_episode(name, tenant_of(request)) or found.example
        return json_response({"name": name, **msgspec.to_builtins(found), "example": example})

    async def _checked_episode(self, name: str, tenant: str) -> str:
        """Return the episode of the newest saved check of any version of an environment; empty without one."""
        for one in await self._checks.of(tenant):
            if one.environment.partition("@")[0] != name.partition("@")[0]:
                continue
            kept = await self._checks.find(tenant, one.id)
            if kept is not None and (episode := orjson.loads(kept[1]).get("transcript")):
                return f"Played by a check: {one.verdict}.\n\n{episode}"
        return ""

    @Route("GET", "/v1/environments/{name}", Action.ENVIRONMENTS_READ, answer=api_types.Environment)
    async def get(self, request: web.Request) -> web.Response:
        """Get an environment and its versions, oldest first."""
        name = request.match_info["name"]
        versions = await asyncio.to_thread(self._uploads.versions, tenant_of(request), name)
        return json_response({"name": name, "versions": [_shown(version) for version in versions]})

    @Route(
        "DELETE",
        "/v1/environments/{name}",
        Action.ENVIRONMENTS_WRITE,
        parameters=(VERSION,),
        answer=api_types.DeletedEnvironment,
    )
    async def delete(self, request: web.Request) -> web.Response:
        """Delete an environment, or one version of it.

        A version that a job still needs stays: of a name all of whose versions shall go, all of them do."""
        tenant, name, version = tenant_of(request), request.match_info["name"], VERSION.read(request)
        versions = await asyncio.to_thread(self._uploads.versions, tenant, name)
        going = {str(Reference(name, v.version, v.digest)) for v in versions if version in (0, v.version)}
        active = [job for job in await self.ctx.store.active_jobs() if job.tenant == tenant]
        used = [job for job in active if job.spec.get("environment", {}).get("name") in going]
        if used:
            jobs = ", ".join(job.id for job in used[:5])
            raise Conflict(f"{len(used)} unfinished jobs use it: {jobs}; cancel them first")
        for sweep, uses in (await self._sweeps.active_uses()).items():
            if going & set(uses) and await self._sweeps.tenant(sweep) == tenant:
                raise Conflict(f"sweep {sweep} (running) uses it; cancel it first")
        gone = await asyncio.to_thread(self._uploads.delete, tenant, name, version or None)
        return json_response({"name": name, "deleted": [v.version for v in gone]})


async def _part(request: web.Request) -> bytes:
    """The next part of the body, empty at its end. Raises SlowBody, BrokenBody."""
    async with body_read(request, "the next part of the body"):
        return await request.content.read(MIB)


def _said_digest(request: web.Request) -> bytes | None:
    """`Content-Digest: sha-256=:BASE64:` (RFC 9530). Raises SpecError for one that says nothing we know."""
    text = request.headers.get("Content-Digest")
    if text is None:
        return None
    for part in text.split(","):
        if found := re.fullmatch(r"sha-256=:([A-Za-z0-9+/]{43}=):", part.strip()):
            return base64.b64decode(found[1])
    raise SpecError.of("Content-Digest", text[:100], "must have sha-256=:BASE64: (RFC 9530)")


def _shown(version: Version) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(version)
    shown["class"] = shown.pop("path")
    return shown
