"""Uploaded environments from Python: a directory -> the tar that the server takes, and the calls about what it has."""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from opentinker.sdk.http import ApiError, Http, resource
from opentinker.shared.api_types import (
    DeletedEnvironment,
    Environment,
    EnvironmentCheck,
    EnvironmentChecks,
    EnvironmentCheckSummary,
    EnvironmentDescription,
    EnvironmentReport,
    Environments,
    EnvironmentSummary,
    PushedEnvironment,
)

LEFT_OUT = (".*", "__pycache__", "*.pyc", "venv", "node_modules", "*.egg-info", "build", "dist")
"""Names of files and directories that are not sent."""
ENVIRONMENTS, CHECKS = "/v1/environments", "/v1/checks"
PUSH_S = 120.0
"""The server may make a virtual environment before it answers."""


class EnvironmentCalls:
    """Calls of AsyncClient for environments."""

    _http: Http

    async def push_environment(self, directory: str | Path, name: str | None = None) -> PushedEnvironment:
        """A directory with environment.toml (or pyproject.toml), code and a lock. The answer's `environment` is its
        exact name in a spec. Raises ApiError with every mistake."""
        body = await asyncio.to_thread(pack, directory)
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        headers = {"Content-Type": "application/x-tar", "Content-Digest": f"sha-256=:{digest}:"}
        query = {"name": name} if name else {}
        return await self._http.json(
            PushedEnvironment, "POST", ENVIRONMENTS, query, body=body, headers=headers, timeout_s=PUSH_S
        )

    async def environments(self) -> list[EnvironmentSummary]:
        """The environments that were pushed to your tenant, with their newest versions."""
        return (await self.all_environments())["environments"]

    async def all_environments(self) -> Environments:
        """Return what a job may play by name: `built_in`, names that the env workers offer, and `environments`, what
        was pushed to your tenant."""
        return await self._http.json(Environments, "GET", ENVIRONMENTS)

    async def environment(self, name: str) -> Environment:
        """A pushed environment with all its versions. Raises ApiNotFound."""
        return await self._http.json(Environment, "GET", resource("environments", name))

    async def describe_environment(self, name: str) -> EnvironmentDescription:
        """Return the documentation, settings and scripted players of an environment, by its name in a spec: one that is
        built in, or `upload:NAME`. An env worker imports it. Raises ApiError."""
        return await self._http.json(EnvironmentDescription, "GET", "/v1/environment", {"name": name})

    async def delete_environment(self, name: str, version: int | None = None) -> list[int]:
        """The versions that are gone: one, or all of them. Asked once: the second time there would be none."""
        query = {} if version is None else {"version": str(version)}
        path = resource("environments", name)
        return (await self._http.json(DeletedEnvironment, "DELETE", path, query, again=False))["deleted"]

    async def save_check(self, report: EnvironmentReport) -> EnvironmentCheckSummary:
        """Save the report of a check for the page, in place of the last one on the same environment."""
        return await self._http.json(EnvironmentCheckSummary, "POST", CHECKS, noun=report)

    async def environment_checks(self) -> list[EnvironmentCheckSummary]:
        """The saved checks of environments, newest first."""
        return (await self._http.json(EnvironmentChecks, "GET", CHECKS))["checks"]

    async def environment_check(self, id: str) -> EnvironmentCheck:
        """A saved check with its report. Raises ApiNotFound."""
        return await self._http.json(EnvironmentCheck, "GET", resource("checks", id))

    async def delete_environment_check(self, id: str) -> EnvironmentCheckSummary:
        """Delete a saved check. Raises ApiNotFound."""
        return await self._http.json(EnvironmentCheckSummary, "DELETE", resource("checks", id), again=False)


def pack(place: str | Path) -> bytes:
    """Pack a directory as a tar. Blocking. Raises ApiError if it is not a directory or contains links."""
    directory = Path(place).expanduser()
    if not directory.is_dir():
        raise ApiError(f"{directory} is not a directory")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in _files(directory):
            entry = tarfile.TarInfo(path.relative_to(directory).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return out.getvalue()


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        for name in sorted([*names, *folders]):
            path = Path(folder, name)
            if path.is_symlink() and not _left_out(name):
                raise ApiError(f"{path} is a link: only plain files can be pushed; put a copy in its place")
            if name in names and not _left_out(name):
                yield path


def _left_out(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)
