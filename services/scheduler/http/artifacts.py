"""Handlers of what jobs leave behind: checkpoints and files, listed and downloaded.

download   consumes Range and If-Range; produces the bytes from there on, with what a client needs to go on later
"""

from __future__ import annotations

import re

from aiohttp import web

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.catalog import repr_digest
from opentinker.services.scheduler.http.byte_ranges import send
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.shared.types.errors import SpecError

LONGEST = 400


class ArtifactsApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.artifacts = jobs, jobs.artifacts

    async def list(self, request: web.Request) -> web.Response:
        """`bytes`: of all of them."""
        job = await self.jobs.found(request)
        found = await self.artifacts.listed(job)
        return json_response({"artifacts": found, "bytes": sum(entry["bytes"] for entry in found)})

    async def file(self, request: web.Request) -> web.StreamResponse:
        job = await self.jobs.found(request)
        path = request.query.get("path", "")
        if not 0 < len(path) <= LONGEST or not path.isprintable():
            problem = "must be the path of a file, as GET /v1/jobs/ID/artifacts lists them"
            raise SpecError([{"field": "path", "value": path[:100], "problem": problem}])
        opened, sha256 = await self.artifacts.open(job, path)
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{job.id}-{path}")
        media = "application/x-ndjson" if path.endswith(".jsonl") else "application/octet-stream"
        headers = {"Repr-Digest": repr_digest(sha256)}
        return await send(request, opened, etag=f'"{sha256}"', name=name, media=media, headers=headers)

    async def checkpoints(self, request: web.Request) -> web.Response:
        job = await self.jobs.found(request)
        return json_response({"checkpoints": checkpoint_dir.listed(await self.artifacts.checkpoints(job))})

    async def download(self, request: web.Request) -> web.StreamResponse:
        """A checkpoint; the manifest that it begins with has the SHA-256 of every other file."""
        job = await self.jobs.found(request)
        step, everything = step_of(request), request.query.get("all", "0")
        if everything not in ("0", "1"):
            raise SpecError([{"field": "all", "value": everything[:100], "problem": "must be 0 or 1"}])
        found = await self.artifacts.checkpoints(job)
        archive = await checkpoint_dir.open_archive(found, step, everything == "1")
        name, headers = f"{job.id}-step-{archive.step}.tar", {"X-Checkpoint-Step": str(archive.step)}
        return await send(request, archive, etag=archive.etag, name=name, media="application/x-tar", headers=headers)


def step_of(request: web.Request) -> int | None:
    """Return the step in the path; None: the newest. Raises SpecError."""
    text = request.match_info["step"]
    if not (text == "latest" or re.fullmatch(r"[0-9]{1,12}", text)):
        raise SpecError([{"field": "step", "value": text[:100], "problem": "must be a step number or `latest`"}])
    return None if text == "latest" else int(text)
