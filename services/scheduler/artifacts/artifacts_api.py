"""Handlers of what jobs leave behind: checkpoints and files, listed and downloaded.

download   consumes Range and If-Range; produces the bytes from there on, with what a client needs to resume later
"""

from __future__ import annotations

import re

from aiohttp import web

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.catalog import repr_digest
from opentinker.services.scheduler.http.byte_ranges import send
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import POLICY, JobsApi
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import SpecError

MAX_PATH = 400

ALL = Parameter("all", "`1`: include optimizer and random state, to resume elsewhere.")
OF_POLICY = Parameter("policy", "Files of one of the job's policies; default: the job's own, its log and events.")
PATH = Parameter("path", "Path of the file in the list of artifacts.")
RANGE = Parameter("Range", "`bytes=FIRST-`: the rest of an interrupted download, answered with 206.", "header")
IF_RANGE = Parameter(
    "If-Range",
    "ETag of the interrupted download; for other content the response is the whole, 200.",
    "header",
)


class ArtifactsApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.artifacts = jobs, jobs.artifacts

    @Route("GET", "/v1/jobs/{id}/artifacts", Action.JOBS_READ, parameters=(OF_POLICY,), answer=api_types.Artifacts)
    async def list(self, request: web.Request) -> web.Response:
        """List the files of a job.

        `bytes`: of all of them."""
        job = await self._own_or_part(request)
        found = await self.artifacts.listed(job)
        return json_response({"artifacts": found, "bytes": sum(entry["bytes"] for entry in found)})

    @Route(
        "GET",
        "/v1/jobs/{id}/artifacts/download",
        Action.CHECKPOINTS_READ,
        parameters=(PATH, OF_POLICY, RANGE, IF_RANGE),
        content="application/octet-stream",
    )
    async def file(self, request: web.Request) -> web.StreamResponse:
        """Download a file of a job."""
        job = await self._own_or_part(request)
        path = request.query.get("path", "")
        if not 0 < len(path) <= MAX_PATH or not path.isprintable():
            problem = "must be the path of a file, as GET /v1/jobs/ID/artifacts lists them"
            raise SpecError.of("path", path[:100], problem)
        opened, sha256 = await self.artifacts.open(job, path)
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{job.id}-{path}")
        media = "application/x-ndjson" if path.endswith(".jsonl") else "application/octet-stream"
        headers = {"Repr-Digest": repr_digest(sha256)}
        return await send(request, opened, etag=f'"{sha256}"', name=name, media=media, headers=headers)

    async def _own_or_part(self, request: web.Request) -> JobRecord:
        """Return the job, whose own files are its log and events, or the policy that the request names."""
        job = await self.jobs.found(request)
        return self.jobs.part(request, job) if "policy" in request.query else job

    @Route("GET", "/v1/jobs/{id}/checkpoints", Action.JOBS_READ, parameters=(POLICY,), answer=api_types.Checkpoints)
    async def checkpoints(self, request: web.Request) -> web.Response:
        """List checkpoints, oldest first."""
        job = self.jobs.part(request, await self.jobs.found(request))
        return json_response({"checkpoints": checkpoint_dir.listed(await self.artifacts.checkpoints(job))})

    @Route(
        "GET",
        "/v1/jobs/{id}/checkpoints/{step}/download",
        Action.CHECKPOINTS_READ,
        parameters=(ALL, POLICY, RANGE, IF_RANGE),
        content="application/x-tar",
    )
    async def download(self, request: web.Request) -> web.StreamResponse:
        """Download a checkpoint as a tar archive; `step` is a number or `latest`.

        A checkpoint; the manifest that it begins with has the SHA-256 of every other file."""
        job = self.jobs.part(request, await self.jobs.found(request))
        step, everything = step_of(request), request.query.get("all", "0")
        if everything not in ("0", "1"):
            raise SpecError.of("all", everything[:100], "must be 0 or 1")
        archive = await self.artifacts.open_checkpoint(job, step, everything == "1")
        name, headers = f"{job.id}-step-{archive.step}.tar", {"X-Checkpoint-Step": str(archive.step)}
        return await send(request, archive, etag=archive.etag, name=name, media="application/x-tar", headers=headers)


def step_of(request: web.Request) -> int | None:
    """Return the step in the path; None: the newest. Raises SpecError."""
    text = request.match_info["step"]
    if not (text == "latest" or re.fullmatch(r"[0-9]{1,12}", text)):
        raise SpecError.of("step", text[:100], "must be a step number or `latest`")
    return None if text == "latest" else int(text)
