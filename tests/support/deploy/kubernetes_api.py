"""A stand-in for Kubernetes' API server: pods of one namespace, as its reference describes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

TOKEN = "a-token-of-a-service-account"
DEPLOYMENT_UID = "0b9f0f1e-5a76-4a51-8f0c-6f6a3f6f5f11"


class KubernetesApi:
    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request, oldest first."""
        self.busy = 0
        """So many requests are answered 429 first."""
        self.refuses = ""
        """Why pods are refused, if they are: a quota."""
        self.page = 2
        """Pods in an answer, whatever is asked for."""
        self.lingers = False
        """Pods that are deleted have a time of grace first."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        pods = "/api/v1/namespaces/research/pods"
        app.add_routes(
            [
                web.get(pods, self._list),
                web.post(pods, self._create),
                web.delete(pods + "/{name}", self._delete),
                web.get("/apis/apps/v1/namespaces/research/deployments/rl-scheduler", self._deployment),
            ]
        )
        return app

    def finish(self, name: str, phase: str = "Succeeded", **status: str) -> None:
        self.pods[name]["status"] = {"phase": phase, **status}

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if self.busy:
            self.busy -= 1
            return _status(429, "too many requests", {"Retry-After": "0"})
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [pod for _, pod in sorted(self.pods.items()) if pod["metadata"]["labels"].get(key) == value]
        first = int(request.query.get("continue", "0"))
        rest = first + min(self.page, int(request.query["limit"]))
        metadata = {"continue": str(rest)} if rest < len(found) else {}
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": found[first:rest]})

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        if name in self.pods:
            return _status(409, f'pods "{name}" already exists')
        if self.refuses:
            return _status(403, self.refuses)
        pod["metadata"]["creationTimestamp"] = "2026-11-22T08:00:00Z"
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        return web.json_response(pod, status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return _status(404, f'pods "{name}" not found')
        if self.lingers:
            self.pods[name]["metadata"]["deletionTimestamp"] = "2026-11-22T08:01:00Z"
            return web.json_response(self.pods[name])
        return web.json_response(self.pods.pop(name))

    async def _deployment(self, _: web.Request) -> web.Response:
        return web.json_response({"kind": "Deployment", "metadata": {"name": "rl-scheduler", "uid": DEPLOYMENT_UID}})


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)


@asynccontextmanager
async def kubernetes() -> AsyncIterator[tuple[KubernetesApi, str]]:
    api = KubernetesApi()
    async with TestServer(api.app()) as server:
        yield api, str(server.make_url("")).rstrip("/")
