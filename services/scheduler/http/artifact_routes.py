"""The part of the route table that is about what jobs leave."""

from __future__ import annotations

from opentinker.services.scheduler.http.artifacts import ArtifactsApi
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.openapi import Parameter, Route
from opentinker.services.scheduler.http.publishing import NewPublication, PublishingApi
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action

ALL = Parameter("all", "query", "`1`: with optimizer and random state, to resume elsewhere.")
PATH = Parameter("path", "query", "Of the list of artifacts.")
RANGE = Parameter("Range", "header", "`bytes=FIRST-`: the rest of a download that broke off, answered 206.")
IF_RANGE = Parameter("If-Range", "header", "The ETag of what there is already: of anything else comes the whole, 200.")


def artifact_routes(jobs: JobsApi) -> list[Route]:
    get = "/v1/jobs/{id}"
    artifacts, publishing = ArtifactsApi(jobs), PublishingApi(jobs)
    return [
        Route(
            "GET",
            get + "/checkpoints",
            artifacts.checkpoints,
            Action.JOBS_READ,
            "Committed checkpoints, oldest first",
            answer=api_types.Checkpoints,
        ),
        Route(
            "GET",
            get + "/checkpoints/{step}/download",
            artifacts.download,
            Action.CHECKPOINTS_READ,
            "A checkpoint as a tar stream; `step` is a number or `latest`",
            200,
            (ALL, RANGE, IF_RANGE),
            content="application/x-tar",
        ),
        Route(
            "GET",
            get + "/artifacts",
            artifacts.list,
            Action.JOBS_READ,
            "All files that the job has left so far",
            answer=api_types.Artifacts,
        ),
        Route(
            "GET",
            get + "/artifacts/download",
            artifacts.file,
            Action.CHECKPOINTS_READ,
            "One of these files",
            200,
            (PATH, RANGE, IF_RANGE),
            content="application/octet-stream",
        ),
        Route(
            "DELETE",
            get + "/checkpoints/{step}",
            publishing.delete_checkpoint,
            Action.CHECKPOINTS_WRITE,
            "Delete a checkpoint that is neither published nor in use",
            answer=api_types.DeletedArtifacts,
        ),
        Route(
            "DELETE",
            get + "/artifacts",
            publishing.delete_all,
            Action.CHECKPOINTS_WRITE,
            "Delete all that a job left which is over",
            answer=api_types.DeletedArtifacts,
        ),
        Route(
            "POST",
            "/v1/published",
            publishing.publish,
            Action.CHECKPOINTS_WRITE,
            "Give a checkpoint a name within the tenant; it stays while it has one",
            201,
            body=NewPublication,
            answer=api_types.Publication,
        ),
        Route(
            "GET",
            "/v1/published",
            publishing.list,
            Action.CHECKPOINTS_READ,
            "Published checkpoints, by name",
            answer=api_types.Publications,
        ),
        Route(
            "GET",
            "/v1/published/{name}",
            publishing.get,
            Action.CHECKPOINTS_READ,
            "Which checkpoint has the name",
            answer=api_types.Publication,
        ),
        Route(
            "DELETE",
            "/v1/published/{name}",
            publishing.unpublish,
            Action.CHECKPOINTS_WRITE,
            "Take the name from the checkpoint",
            answer=api_types.Publication,
        ),
    ]
