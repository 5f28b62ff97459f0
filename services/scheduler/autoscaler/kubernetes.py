"""The launcher of a cluster: trainers and rollout workers as pods, over Kubernetes' HTTP API.

A pod is the operator's template in `launcher_pods` (the chart writes it) under the worker's name. It never restarts: an
ended pod is deleted and recreated if it is wanted. All pods are owned by the scheduler's Deployment and are
garbage-collected with it. The current pods are listed in every round, by label; no state is kept here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from opentinker.services.scheduler.autoscaler.base import Launched, LauncherFailed
from opentinker.services.scheduler.placement.types import NO_GPUS, UNKNOWN, Gpus
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import ROLLOUT, TRAINER
from opentinker.shared.settings_sources import PREFIX
from opentinker.shared.types.core import Pool
from opentinker.shared.types.errors import SpecError

FILES = {Pool.TRAINER: f"{TRAINER}.json", Pool.ROLLOUT: f"{ROLLOUT}.json"}
BY, POOL = "opentinker.dev/launched-by", "opentinker.dev/pool"
"""Labels."""
TIMEOUT_S = 15.0
PAGE = 200
BUSY_TRIES = 4
MAX_RETRY_AFTER_S = 10.0
"""Longest pause after a 429, regardless of its Retry-After."""
CONFLICT, GONE = 409, 404


class KubernetesLauncher:
    def __init__(self, settings: Settings) -> None:
        assert settings.launcher_pods is not None
        self.prefix = settings.launcher_owner or "launched"
        self._settings = settings
        self._account = settings.launcher_account
        self._templates = {pool: _template(settings.launcher_pods / name) for pool, name in FILES.items()}
        self._owner: dict[str, Any] | None = None
        _read(self._account / "token")
        self._pods = f"/api/v1/namespaces/{_read(self._account / 'namespace')}/pods"
        self._tls = _tls(settings)

    async def running(self) -> list[Launched]:
        found: list[Launched] = []
        query = {"labelSelector": f"{BY}={self.prefix}", "limit": str(PAGE)}
        async with self._session() as session:
            while True:
                page = await self._ask(session, "GET", self._pods, query=query)
                found += [_launched(pod) for pod in page["items"]]
                if not (more := page.get("metadata", {}).get("continue")):
                    return found
                query["continue"] = more

    def gpus(self, pool: Pool, name: str) -> Gpus:
        """Return the number of GPUs in the pod's requests. Their memory is unknown until a worker has reported it."""
        limits = self._templates[pool]["spec"]["containers"][0].get("resources", {}).get("limits", {})
        asked = sum(int(count) for resource, count in limits.items() if resource.rpartition("/")[2] == "gpu")
        return Gpus((UNKNOWN,) * asked, linked=asked, near=asked) if asked else NO_GPUS

    async def start(self, pool: Pool, name: str) -> None:
        async with self._session() as session:
            pod = self._pod(pool, name, await self._owned_by(session))
            await self._ask(session, "POST", self._pods, body=pod, fine=(CONFLICT,))

    async def end(self, name: str) -> None:
        """End a pod with its own grace period. Idempotent."""
        async with self._session() as session:
            await self._ask(session, "DELETE", f"{self._pods}/{name}", fine=(GONE, CONFLICT))

    def _pod(self, pool: Pool, name: str, owner: dict[str, Any] | None) -> dict[str, Any]:
        pod = deepcopy(self._templates[pool])
        metadata, spec = pod.setdefault("metadata", {}), pod["spec"]
        metadata["name"] = name
        metadata["labels"] = {**metadata.get("labels", {}), BY: self.prefix, POOL: str(pool)}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        spec["restartPolicy"] = "Never"
        own = {PREFIX + "WORKER_ID": name, PREFIX + "IDLE_EXIT_S": f"{self._settings.launcher_idle_s:g}"}
        given = [one for one in spec["containers"][0].get("env", []) if one["name"] not in own]
        spec["containers"][0]["env"] = [*given, *({"name": key, "value": value} for key, value in own.items())]
        return {"apiVersion": "v1", "kind": "Pod", **pod}

    async def _owned_by(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        """Return the owner reference. The uid is requested once: a recreated Deployment comes with a new scheduler."""
        name = self._settings.launcher_owner
        if name and self._owner is None:
            path = self._pods.replace("/api/v1/", "/apis/apps/v1/").removesuffix("pods") + f"deployments/{name}"
            found = await self._ask(session, "GET", path)
            uid = found["metadata"]["uid"]
            self._owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}
        return self._owner

    # --- HTTP ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The token is read each time: Kubernetes writes a new one from time to time."""
        headers = {"Authorization": f"Bearer {_read(self._account / 'token')}", "Accept": "application/json"}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(
            self._settings.launcher_api, headers=headers, timeout=timeout,
            connector=aiohttp.TCPConnector(ssl=self._tls),
        ) as session:  # fmt: skip
            yield session

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, path: str, *,
        query: dict[str, str] | None = None, body: dict[str, Any] | None = None, fine: tuple[int, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Empty for an answer that is `fine`. Waits where the API is busy (429); raises LauncherFailed otherwise."""
        for tries in range(BUSY_TRIES):
            try:
                async with session.request(method, path, params=query, json=body) as answer:
                    status, text = answer.status, await answer.read()
                    pause = answer.headers.get("Retry-After", "1")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise LauncherFailed(f"{method} {path}: {error or type(error).__name__}") from error
            if status != 429 or tries == BUSY_TRIES - 1:
                break
            await asyncio.sleep(min(MAX_RETRY_AFTER_S, float(pause) if pause.isdigit() else 1.0))
        if status in fine:
            return {}
        if status >= 300:
            raise LauncherFailed(f"{method} {path} was answered {status}: {_message(text)}")
        try:
            return dict(orjson.loads(text))
        except orjson.JSONDecodeError:
            raise LauncherFailed(f"{method} {path} was answered with what is no JSON") from None


def _launched(pod: dict[str, Any]) -> Launched:
    metadata, status = pod["metadata"], pod.get("status", {})
    phase = status.get("phase", "Pending")
    ended = ""
    if phase in ("Succeeded", "Failed"):
        ended = " ".join(filter(None, [f"its pod has {phase.lower()}", status.get("reason"), status.get("message")]))
    return Launched(metadata["name"], Pool(metadata["labels"][POOL]), ended)


def _template(path: Path) -> dict[str, Any]:
    """Raises SpecError."""
    try:
        pod = orjson.loads(path.read_bytes())
        found = pod["spec"]["containers"][0]["name"]
    except (OSError, orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        problem = f"must be a Pod as JSON, with spec.containers: {error!r}"
        raise SpecError.of("launcher_pods", str(path), problem) from None
    assert found
    return dict(pod)


def _read(path: Path) -> str:
    """Raises SpecError."""
    try:
        return path.read_text().strip()
    except OSError as error:
        problem = f"{error.strerror}: does the pod have a service account's token?"
        raise SpecError.of("launcher_account", str(path), problem) from None


def _tls(settings: Settings) -> ssl.SSLContext | bool:
    if settings.launcher_api.startswith("http:"):
        return True
    path = settings.launcher_account / "ca.crt"
    _read(path)
    return ssl.create_default_context(cafile=str(path))


def _message(text: bytes) -> str:
    """Return the message of a Kubernetes Status."""
    try:
        return str(orjson.loads(text)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text[:200].decode(errors="replace")
