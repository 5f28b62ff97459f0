"""Child processes in sandboxes: the program that plays an environment, the directories mounted with it, and its output.

An upload runs in its own virtual environment and sees that, its own files and the runtime (venv_overlay.py). An
operator's environment that a job wants isolated sees the packages of the env worker and the directories of PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from opentinker.envs.runtime.packages import Packages
from opentinker.envs.runtime.venv_overlay import OWN, PATH, own_package, package_dir
from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.sandbox.sandbox import Sandbox, Sandboxed, Unavailable, own_packages
from opentinker.shared.types.errors import SpecError

CHILD = "opentinker.envs.runtime.child"
VENV, FILES = "/venv", "/upload"
VARIABLES = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
CHUNK = 8192
PAUSE_S = 0.05
"""Pause between chunks of a child's output: a child that prints faster waits, without delaying others."""
END_S = 5.0
"""Time until the output pipe of ended children reaches its end."""
LOGGED = 64 * 1024
"""Bytes of a child's output that the log keeps."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Program:
    """Start command of a child for one environment."""

    title: str
    python: str
    binds: dict[str, str]
    variables: dict[str, str]
    path: str
    """`module:Class` of an upload; empty: each session names its environment."""
    modules: bool


class Sandboxes:
    """`unavailable`: the reason if sandboxes are unavailable."""

    def __init__(self, sandbox: Sandbox | None, settings: Settings, unavailable: str = "") -> None:
        self.unavailable = unavailable
        self._sandbox = sandbox
        self._modules = settings.env_modules
        self._data_dir = settings.data_dir.resolve()
        self._packages = Packages(settings.data_dir, settings.upload_venv_mb)
        self._listening: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: Settings) -> Sandboxes:
        try:
            return cls(await Sandbox.open(settings), settings)
        except Unavailable as error:
            log.info("sandbox_unavailable", effect="jobs with uploaded environments are refused")
            log.debug("sandbox_unavailable", reason=str(error))  # the submission of such a job reports it too
            return cls(None, settings, str(error))

    async def close(self) -> None:
        """Log the last output of ended children and close their pipes."""
        if self._listening:
            await asyncio.wait(self._listening, timeout=END_S)
        await cancel_and_wait(*self._listening)
        await self._packages.close()

    async def program(self, name: str) -> Program:
        """Return the start command. For an upload this may have to create its virtual environment. Raise SpecError."""
        if self._sandbox is None:
            problem = f"is not available on this env worker: {self.unavailable}"
            raise SpecError.of("environment.isolation", "sandbox", problem)
        if uploads.is_upload(name):
            return await self._upload_program(name)
        places = [place for place in self._operators_places() if place != os.path.dirname(package_dir())]
        binds = own_packages() | own_package() | {place: place for place in places}
        variables = VARIABLES | {"PYTHONPATH": os.pathsep.join([OWN, *places])}
        return Program(name, sys.executable, binds, variables, "", self._modules)

    async def _upload_program(self, name: str) -> Program:
        installed = await self._packages.find(name)
        package = installed.package
        code = f"{FILES}/{package.root}".rstrip("/")
        binds = {VENV: str(installed.venv), FILES: str(installed.files), **installed.runtime}
        variables = VARIABLES | {"PYTHONPATH": os.pathsep.join([*PATH, code])}
        return Program(name, f"{VENV}/bin/python", binds, variables, package.path, True)

    def _operators_places(self) -> list[str]:
        """Return the directories of PYTHONPATH, except those that contain data_dir and would expose every job's
        files."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        places = [os.path.realpath(place) for place in given if place and os.path.isdir(place)]
        return [place for place in dict.fromkeys(places) if not self._data_dir.is_relative_to(Path(place))]

    async def start(self, program: Program, descriptor: int) -> Sandboxed:
        """Start a child that answers on the socket `descriptor`. Raise Unavailable, OSError."""
        assert self._sandbox is not None
        argv = [program.python, "-m", CHILD, str(descriptor), str(int(program.modules)), program.path]
        running = await self._sandbox.start(
            argv,
            binds=program.binds,
            variables=program.variables,
            pass_fds=[descriptor],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert running.process.stdout is not None
        listening = asyncio.get_running_loop().create_task(_listen(running.process.stdout, program.title))
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)
        return running


async def _listen(output: asyncio.StreamReader, title: str) -> None:
    """Log a child's output up to a limit, then read and discard it slowly. Ends with the child."""
    heard = 0
    while chunk := await output.read(CHUNK):
        if heard < LOGGED:
            log.info("environment_output", environment=title, text=chunk.decode(errors="replace"))
        elif heard < LOGGED + len(chunk):
            log.warning("environment_output_truncated", environment=title, kept_bytes=LOGGED)
        heard += len(chunk)
        await sleep(PAUSE_S)
