"""Sandboxes of the user's Docker engine, through the `docker` command: a container per episode, without network.

    image        opentinker-harbor:KEY           what `docker build` makes of the task's environment folder
    container    harbor-HOST__PID-TICKS-RANDOM     its files are the episode's; restarted for each set of processes
    fork         opentinker-harbor-fork:...      `docker commit` of a container, removed with what was made of it

The engine must run on this machine: containers see files of data_dir. Their processes are root with the capabilities
that file owners need, and no other; the engine's user namespaces (`userns-remap`), where they are set, apply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentinker.envs.harbor.box import READ_BYTES, RUNNER, SHARED, Box, Interpreter
from opentinker.envs.harbor.image import FILE, FIRST, LAYERS, VERSION, Shell, TaskImage
from opentinker.envs.harbor.roots import made_once
from opentinker.envs.harbor.task import DOCKERFILE, ENVIRONMENT, Task, TaskMachine
from opentinker.envs.harbor.workspace import EPISODES, HOME, Workspace, is_abandoned, is_stale, limits_of, new_place
from opentinker.shared.config import Settings
from opentinker.shared.runtime.reexec import below
from opentinker.shared.sandbox.limits import Limits
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

IMAGES, FORKS, CONTAINERS = "opentinker-harbor", "opentinker-harbor-fork", "harbor-"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
CALL_S = 120.0
STOP_S = 20.0
RETRY_S = 0.5
SHOWN = 1500
"""Characters of a failed build's output."""
GONE = "no such "
"""The engine's error, in lower case, for a container or an image that does not exist."""
OUT_OF_MEMORY = "its processes held more memory than environment.memory_mb of the task"
LIMITED = "{{.MemoryLimit}} {{.PidsLimit}} {{.CPUCfsQuota}}"


class DockerRuntime:
    """Make it with `open`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.interpreter = settings, Interpreter()
        self.home = settings.data_dir.resolve() / HOME
        self._forks: set[str] = set()
        """Images of forks that are no longer needed and might still have children."""
        self._dropping = threading.Lock()

    @classmethod
    async def open(cls, settings: Settings) -> DockerRuntime:
        """Raises Unavailable."""
        try:
            limited = await asyncio.to_thread(docker, "info", "--format", LIMITED)
        except OSError as error:
            raise Unavailable(f"harbor_sandbox is `docker`, and no Docker engine answers: {error}") from None
        if "false" in limited:
            raise Unavailable("the Docker engine cannot limit memory, processes and processors here (docker info)")
        return cls(settings)

    def make(self, image: TaskImage, machine: TaskMachine) -> DockerWorkspace:
        if not image.docker:
            raise OSError("the set was added with another harbor_sandbox: opentinker env add harbor:PATH")
        cpus = min(machine.cpus, os.cpu_count() or 1)
        return DockerWorkspace(self, image, limits_of(self.settings, machine), cpus, image.docker)

    def remove_stale(self) -> None:
        for name in docker("ps", "--all", "--filter", f"name=^{CONTAINERS}", "--format", "{{.Names}}").split():
            if is_stale(name.removeprefix(CONTAINERS).replace("__", "~")):
                _removed("rm", "--force", "--volumes", name)
        for tag in docker("images", FORKS, "--format", "{{.Tag}}").split():
            if is_stale(tag.replace("__", "~")):
                _removed("rmi", "--force", f"{FORKS}:{tag}")
        for old in (self.home / EPISODES).iterdir():
            if is_abandoned(old):
                shutil.rmtree(old, ignore_errors=True)

    def drop(self, fork: str) -> None:
        """Remove the image of a fork, later if others were made of it. Blocking."""
        with self._dropping:
            self._forks = {one for one in (*self._forks, fork) if not _removed("rmi", one)}

    async def build(self, task: Task) -> tuple[TaskImage, bool]:
        """Return the task's image, and whether it was built now. Raises SpecError if it cannot be, OSError."""
        id = await asyncio.to_thread(_built, task)
        variables = task.config.environment.env
        key = f"docker-{hashlib.sha256(codec.to_json([VERSION, id, sorted(variables.items())])).hexdigest()[:20]}"
        name = f"{IMAGES}:{key}"
        await asyncio.to_thread(docker, "tag", id, name)  # each time: somebody may have removed it
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(TaskImage.load, self.home, key), False
        given: dict[str, Any] = json.loads(
            await asyncio.to_thread(docker, "image", "inspect", "--format", "{{json .Config}}", id)
        )
        if given.get("Volumes"):
            why = "the image declares volumes, where what is written is neither limited nor forked"
            raise SpecError.of(f"{task.name}/environment", sorted(given["Volumes"]), why)
        own = dict(pair.split("=", 1) for pair in given.get("Env") or [] if "=" in pair)
        shell = Shell(given.get("WorkingDir") or "/", {**FIRST, **own, **variables})
        image = TaskImage(key=key, places={}, shell=shell, docker=name)
        with made_once(self.home / LAYERS / key) as work:
            (work / FILE).write_bytes(codec.to_json(image))
        return image, True


class DockerWorkspace(Workspace):
    def __init__(
        self, runtime: DockerRuntime, image: TaskImage, limits: Limits, cpus: int, base: str, inherited: int = 0
    ) -> None:
        """`base`: the image with its files, of which `inherited` bytes count as written. Blocking. Raises OSError."""
        super().__init__(image, limits, new_place(runtime.home))
        self._runtime, self._cpus, self._base, self._inherited = runtime, cpus, base, inherited
        self._name = CONTAINERS + self._place.name.replace("~", "__")
        interpreter, memory = runtime.interpreter, f"{limits.memory_mb}m"
        binds = {**interpreter.binds, SHARED: self.shared}
        mounts = [word for place, path in binds.items() for word in ("--volume", f"{path}:{place}:ro")]
        # The image's variables are for its programs, which get them with each command: PYTHONPATH or LD_PRELOAD would
        # load its code into the runner.
        variables = dict.fromkeys(image.shell.variables, "") | interpreter.variables
        named = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        able = [word for capability in CAPABILITIES for word in ("--cap-add", capability)]
        program, *arguments = interpreter.argv
        try:
            docker(
                "create", "--pull", "never", "--no-healthcheck", "--interactive", "--name", self._name,
                "--network", "none", "--user", "0:0", "--workdir", "/",
                "--hostname", "sandbox", "--memory", memory, "--memory-swap", memory, "--cpus", str(cpus),
                "--pids-limit", str(limits.processes), "--cap-drop", "ALL", *able, "--security-opt",
                "no-new-privileges", "--log-driver", "none", *mounts, *named, "--entrypoint", program, base, *arguments,
                RUNNER, "0", "1", "{}", "[]",
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._place, ignore_errors=True)
            raise

    async def _start(self) -> Box:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "docker", "start", "--attach", "--interactive", self._name,
            stdin=pipe, stdout=pipe, stderr=pipe, limit=READ_BYTES, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stdin is not None
        return await Box(Container(self._name, process), process.stdout, process.stdin).ready()

    def _copy(self) -> DockerWorkspace:
        fork = f"{FORKS}:{new_place(self._runtime.home).name.replace('~', '__')}"
        docker("commit", self._name, fork)
        try:
            return DockerWorkspace(self._runtime, self.image, self._limits, self._cpus, fork, self.written())
        except BaseException:
            self._runtime.drop(fork)
            raise

    def written(self) -> int:
        format = "{{.SizeRw}}"
        size = docker("container", "inspect", "--size", "--format", format, self._name)
        return self._inherited + int(size)

    def pids(self) -> list[int]:
        if not self.is_running:
            return []
        first = int(docker("container", "inspect", "--format", "{{.State.Pid}}", self._name))
        return [first, *below(first)] if first else []

    def remove(self) -> None:
        _removed("rm", "--force", "--volumes", self._name)
        if self._base != self.image.docker:
            self._runtime.drop(self._base)
        shutil.rmtree(self._place, ignore_errors=True)


class Container:
    """The processes of a started container."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        """`process`: the client that started it and holds its input."""
        self.reason, self.was_lost = "", False
        self._name, self._process = name, process
        self._killing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self, reason: str) -> None:
        if not self.has_ended and self._killing is None:
            self.reason = self.reason or reason
            self._killing = asyncio.get_running_loop().create_task(self._kill())

    async def _kill(self) -> None:
        """Kill it until it has ended: it may not have begun yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while not self.has_ended:
                    await asyncio.to_thread(_quietly, "kill", self._name)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._process.wait(), RETRY_S)
        if not self.has_ended:
            self._process.kill()

    async def wait(self) -> None:
        """Raises Unavailable if its processes cannot be ended."""
        if self._killing is not None:
            await asyncio.wait([self._killing])
        await self._process.wait()
        ran_on, is_out_of_memory = await asyncio.to_thread(self._ended)
        if not self.reason or self.reason == "it ended":
            assert self._process.stderr is not None
            said = (await self._process.stderr.read(SHOWN)).decode(errors="replace").strip()
            self.was_lost = ran_on or bool(said) or (self._process.returncode or 0) < 0
            self.reason = OUT_OF_MEMORY if is_out_of_memory else said or "it ended"

    def _ended(self) -> tuple[bool, bool]:
        """See that no process of it runs on: the client that started it may have ended alone. Return whether any did,
        and whether the kernel ended it for its memory. Blocking. Raises Unavailable."""
        state = self._state()
        ran_on = bool(state) and not state.startswith("false")
        if ran_on:
            _quietly("kill", self._name)
            state = self._state()
        if state and not state.startswith("false") and not _removed("rm", "--force", "--volumes", self._name):
            raise Unavailable("the processes of a Harbor task's sandbox cannot be ended")
        return ran_on, state.endswith("true")

    def _state(self) -> str:
        """Return `RUNNING OOM`, each true or false; empty if it is gone. Blocking. Raises Unavailable."""
        try:
            return docker("container", "inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", self._name)
        except OSError as error:
            if GONE in str(error).lower():
                return ""
            raise Unavailable(f"it is unknown whether a sandbox of a Harbor task has ended: {error}") from None


def docker(*words: str, timeout_s: float = CALL_S) -> str:
    """Run the `docker` command and return its output. Blocking. Raises OSError."""
    try:
        ran = subprocess.run(
            ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"docker {words[0]} took longer than {timeout_s:g} s") from None
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip()).decode(errors="replace")[-SHOWN:]
        raise OSError(f"docker {words[0]}: {said or f'exit status {ran.returncode}'}")
    return ran.stdout.decode(errors="replace").strip()


def _quietly(*words: str) -> bool:
    """Run the command and return whether it succeeded. Blocking."""
    try:
        docker(*words)
    except OSError:
        return False
    return True


def _removed(*words: str) -> bool:
    """Run a command that removes something and return whether it is gone. Blocking."""
    try:
        docker(*words)
    except OSError as error:
        return GONE in str(error).lower()
    return True


def _built(task: Task) -> str:
    """Return the id of the image of the task's environment folder. Blocking. Raises SpecError, OSError."""
    machine, folder = task.config.environment, task.folder / ENVIRONMENT
    if not (folder / DOCKERFILE).is_file():
        name = machine.docker_image or ""
        if not _quietly("image", "inspect", name):
            _or_refuse(task, lambda: docker("pull", name, timeout_s=machine.build_timeout_sec))
        return docker("image", "inspect", "--format", "{{.Id}}", name)
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        told = Path(place, "id")
        words = ("build", "--iidfile", str(told), str(folder))
        _or_refuse(task, lambda: docker(*words, timeout_s=machine.build_timeout_sec))
        return told.read_text().strip()


def _or_refuse(task: Task, call: Callable[[], str]) -> None:
    try:
        call()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SpecError.of(f"{task.name}/environment", None, str(error)) from None
