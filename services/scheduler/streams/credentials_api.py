"""Handler of POST /v1/jobs/{id}/stream-credentials: how to hear a job live on NATS, from a browser or a program.

Such a credential may subscribe to the subjects marked `Subject.shown`, of this job alone, and cannot publish. Earlier
messages are served over HTTP (`history`): a subscriber subscribes first, then reads them, and joins both by the
counters in the messages.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit, urlunsplit

from aiohttp import web

from opentinker.services.scheduler.http.auth import principal_of, secret_of
from opentinker.services.scheduler.http.errors import TooMany, json_response
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.shared import api_types
from opentinker.shared.messaging.permissions import shown_of
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.stream_credentials import StreamCredentialStore, TooManyCredentials, holder_of
from opentinker.shared.types.errors import Conflict

ANY_HOST = ("0.0.0.0", "::")


class StreamCredentialsApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs = jobs
        self._url = jobs.ctx.settings.nats_websocket_url
        self._credentials = StreamCredentialStore(jobs.store.redis)

    @Route("POST", "/v1/jobs/{id}/stream-credentials", Action.JOBS_READ, status=201, answer=api_types.StreamCredentials)
    async def give(self, request: web.Request) -> web.Response:
        """Create a temporary token for the live streams of a job on NATS; the response is the only place that shows
        it."""
        job = await self.jobs.found(request)
        if not self._url:
            raise Conflict("this server has no live streams: nats_websocket_url is not set (docs/security.md)")
        asked, now = principal_of(request), time.time()
        try:
            token, given = await self._credentials.give(
                key=holder_of(asked), secret=secret_of(request), tenant=asked.tenant, job=job.id, now=now,
                life_s=self.jobs.ctx.settings.stream_credential_s,
            )  # fmt: skip
        except TooManyCredentials as error:
            raise TooMany(f"credentials ({error})", error.wait_s) from None
        shown = shown_of(job.id)
        return json_response(
            {
                "servers": [reached_by(self._url, request.url.host or "")],
                "token": token,
                "inbox": given.inbox,
                "expires_at": given.expires,
                "subjects": shown,
                "history": {name: f"/v1/jobs/{job.id}/{name}" for name in shown},
            },
            201,
            {"Cache-Control": "no-store"},
        )


def reached_by(url: str, host: str) -> str:
    """A listener on all addresses is reached by the name by which we were."""
    parts = urlsplit(url)
    if parts.hostname not in ANY_HOST or not host:
        return url
    name = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{name}:{parts.port}"))
