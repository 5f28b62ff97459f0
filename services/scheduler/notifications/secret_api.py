"""Handlers of /v1/webhook-secret: what a tenant's webhooks are signed with."""

from __future__ import annotations

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.notifications import Notifications

NO_STORE = {"Cache-Control": "no-store"}


class WebhookSecretApi:
    def __init__(self, ctx: Context) -> None:
        self._kept = Notifications(ctx.store.redis)

    @Route("GET", "/v1/webhook-secret", Action.JOBS_WRITE, answer=api_types.WebhookSecret)
    async def get(self, request: web.Request) -> web.Response:
        """Show the secret that your tenant's webhooks are signed with."""
        return json_response({"secret": await self._kept.secret(tenant_of(request))}, headers=NO_STORE)

    @Route("POST", "/v1/webhook-secret", Action.JOBS_WRITE, answer=api_types.WebhookSecret)
    async def renew(self, request: web.Request) -> web.Response:
        """Replace the secret that your tenant's webhooks are signed with; the old one is used no more."""
        return json_response({"secret": await self._kept.secret(tenant_of(request), renew=True)}, headers=NO_STORE)
