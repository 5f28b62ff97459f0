"""A project of docker compose that a test starts: commands, containers, what is killed in them, how long they took."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import orjson

from tests.support.cluster import ROOT

COMMAND_S = 3000.0
"""Building everything from nothing."""
CHILD_OF_INIT = "kill -9 $(cat /proc/1/task/1/children)"


def lacking() -> str:
    """Return why nothing can be started here; empty if it can."""
    if shutil.which("docker") is None:
        return "no docker here"
    for words, what in ((["info"], "no docker engine answers"), (["compose", "version"], "docker has no compose v2")):
        tried = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=False)
        if tried.returncode != 0:
            return f"{what}: {(tried.stderr.strip() or tried.stdout.strip()).splitlines()[-1]}"
    return ""


class Project:
    """Its name, its ports and its volumes are its own; images are those of the checkout."""

    def __init__(self, published: dict[str, str]) -> None:
        self.name = f"opentinker-test-{uuid.uuid4().hex[:8]}"
        self._environ = {**os.environ, **published, "DOCKER_BUILDKIT": "1"}
        self._files = ["docker-compose.yml", "deploy/compose.sandbox.yml"]

    def lay(self, file: str, environ: dict[str, str]) -> None:
        """Over the others, from now on."""
        self._files.append(file)
        self._environ |= environ

    def told(self, environ: dict[str, str]) -> None:
        """Environment variables of compose from now on."""
        self._environ |= environ

    async def compose(self, *words: str) -> str:
        files = [word for file in self._files for word in ("-f", file)]
        return await self._run("docker", "compose", "-p", self.name, *files, "--profile", "cpu", *words)

    async def upgrade(self, *options: str) -> str:
        """deploy/upgrade.sh, which finds the project as a person's would: by variables."""
        named = {"COMPOSE_PROJECT_NAME": self.name, "COMPOSE_FILE": ":".join(self._files), "COMPOSE_PROFILES": "cpu"}
        self._environ |= named
        try:
            return await self._run("sh", "deploy/upgrade.sh", *options)
        finally:
            for name in named:
                del self._environ[name]

    async def docker(self, *words: str) -> str:
        return await self._run("docker", *words)

    async def containers(self, service: str) -> list[str]:
        """Ids of those that run."""
        return (await self.compose("ps", "-q", service)).split()

    async def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(await self.docker("inspect", container))[0]
        return found

    async def kill_process(self, container: str) -> None:
        """The service, from inside: a crash, after which Docker starts the container again."""
        await self.docker("exec", container, "sh", "-c", CHILD_OF_INIT)

    async def refuses(self, service: str, *words: str) -> str:
        """Return the output of a command that fails in its container."""
        (container, *_) = await self.containers(service)
        done = await self._done("docker", "exec", container, *words)
        assert done.returncode != 0, f"{service} may: {' '.join(words)}"
        return done.stderr

    async def host(self) -> str:
        """The address under which containers reach this machine; engines do not always name the gateway."""
        (found,) = orjson.loads(await self.docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"]
        return str(found.get("Gateway") or next(ip_network(found["Subnet"]).hosts()))

    async def memory(self) -> str:
        """Return the memory that each container uses."""
        running = (await self.compose("ps", "-q")).split()
        said = await self.docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}", *running)
        return ", ".join(line.removeprefix(f"{self.name}-").split(" / ")[0] for line in sorted(said.splitlines()))

    @contextmanager
    def healthy_first(self) -> Iterator[dict[str, float]]:
        """When each service says for the first time that it is healthy, as Unix times; filled in at the end. It listens
        as it happens: the engine remembers a few events alone."""
        filters = ("--filter", f"label=com.docker.compose.project={self.name}", "--filter", "event=health_status")
        first: dict[str, float] = {}
        with tempfile.TemporaryFile() as said:
            listening = subprocess.Popen(["docker", "events", *filters, "--format", "{{json .}}"], stdout=said)
            try:
                yield first
            finally:
                listening.terminate()
                listening.wait()
            said.seek(0)
            for event in map(orjson.loads, said.read().splitlines()):
                if event["Action"] == "health_status: healthy":
                    service = event["Actor"]["Attributes"]["com.docker.compose.service"]
                    first.setdefault(service, event["timeNano"] / 1e9)

    async def bytes_of(self, image: str) -> int:
        return int(await self.docker("image", "inspect", "-f", "{{.Size}}", image))

    async def _run(self, *argv: str) -> str:
        done = await self._done(*argv)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr[-4000:]}"
        return done.stdout

    async def _done(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            argv,
            cwd=ROOT,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
