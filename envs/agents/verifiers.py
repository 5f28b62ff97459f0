"""`verifiers`: plays unmodified environments of the verifiers library in an interpreter that has it installed.

The library's dependencies conflict with ours, so one process per environment and env worker plays its episodes
concurrently (`verifiers_runner.py`). It is started on first use, ends some time after its last episode, and calls the
model over HTTP like any agent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import structlog
from pydantic import Field, ValidationInfo, field_validator, model_validator

from opentinker.envs.agent import AgentEnvironment, AgentError, Result
from opentinker.envs.agents.program import API_KEY
from opentinker.envs.base import ELSEWHERE, EnvironmentConfig
from opentinker.envs.data import in_event_loop
from opentinker.shared.runtime.reexec import kill_group

RUNNER = Path(__file__).with_name("verifiers_runner.py")
PROBE = Path(__file__).with_name("verifiers_probe.py")
PROBE_BYTES = 1 << 16
PROBE_QUOTED = 300
"""Last characters of its output that an error quotes."""
HUB_ID = r"^([A-Za-z0-9_.-]+/)?[A-Za-z0-9_][A-Za-z0-9_.-]*(@[A-Za-z0-9_.+-]+)?$"
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
KEPT_BEGINNINGS = ("UV_", "PIP_", "SSL_CERT_", "XDG_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
                   "https_proxy", "no_proxy")  # fmt: skip
"""Prefixes of the env worker's environment variables that the process inherits: package sources, no credentials."""
LINE_BYTES = 16 * 1024 * 1024

log = structlog.get_logger()
Json = dict[str, Any]


class Verifiers(AgentEnvironment):
    class Config(EnvironmentConfig):
        id: Annotated[str, Field(pattern=HUB_ID, max_length=200)]
        """The module that verifiers loads: an environment with 0.1, a taskset with 0.2 and later. A name of the
        Environments Hub, `owner/name` or `owner/name@version`, is the installed package `name`, of that version."""
        args: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults
        """Arguments of `load_environment` with 0.1, fields of its EnvConfig with 0.2 and later, e.g.
        `{ agent = { harness = { id = "null" } } }`."""
        python: str = ""
        """Interpreter with verifiers and the environment installed; default: that of the env worker."""
        paths: list[str] = []  # noqa: RUF012
        """Additional module directories, e.g. of an environment that is not installed."""
        split: Literal["train", "eval"] = "train"
        """The data set that is played, with 0.1."""
        client: Literal["chat", "tokens"] = "chat"
        """`chat`: the job's chat template renders the conversation. `tokens`: verifiers renders it, as in its training
        mode (0.2 and later); this needs `tokenizer`, or a model directory that the env worker can read."""
        tokenizer: str = ""
        """Tokenizer for `client = "tokens"`; default: that of the job's model."""
        rows: Annotated[int, Field(ge=1)] = 10_000
        """Number of tasks taken from an infinite taskset."""

        @field_validator("python")
        @classmethod
        def _is_a_program(cls, python: str) -> str:
            if python and shutil.which(python) is None:
                raise ValueError(f"no interpreter {python!r} on the env worker's machine")
            return python

        @model_validator(mode="after")
        def _is_installed(self, info: ValidationInfo) -> Self:
            if not (info.context or {}).get(ELSEWHERE) and not in_event_loop():
                _check_installed(self)
            return self

        @property
        def package(self) -> str:
            return self.id.partition("@")[0].rpartition("/")[2]

    config: Config

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        runner = VerifiersProcess.of(self.config)
        reply = await runner.play({"base_url": base_url, "model": self.policy.model, "row": row})
        return Result(reward=float(reply["reward"]), metrics=reply["metrics"])


def _check_installed(config: Verifiers.Config) -> None:
    """Raise ValueError if the interpreter lacks verifiers, the environment, or the version that is named."""
    python = config.python or sys.executable
    found = _probe(python, config)
    version = config.id.partition("@")[2]
    by = f"prime env install {config.id}" if "/" in config.id else f"uv pip install --python {python} {config.package}"
    install = f"install it with `{by}` where {python} is"
    if not found["verifiers"]:
        raise ValueError(f"verifiers is not installed for {python}: `uv pip install --python {python} verifiers`")
    if not found["found"]:
        raise ValueError(f"{config.id!r} is not installed for {python}: {install}, or name its directory in `paths`")
    if version not in ("", "latest") and _plain(found["version"] or "") != _plain(version):
        there = f"is {found['version']}" if found["version"] else "is no installed package"
        raise ValueError(f"{config.id!r}: {config.package} {there} for {python}: {install}")


def _probe(python: str, config: Verifiers.Config, within_s: float = 20.0) -> Json:
    """Return what verifiers_probe.py prints. Raise ValueError if the interpreter does not run it."""
    try:
        probe = subprocess.Popen(
            [python, str(PROBE), config.package, *config.paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(python),
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"{python} cannot be run: {error}") from None
    late = threading.Timer(within_s, kill_group, [probe.pid])
    late.start()
    with probe:
        assert probe.stdout is not None
        told = probe.stdout.read(PROBE_BYTES)
        kill_group(probe.pid)  # what it has started, or itself if it says too much
    late.cancel()
    try:
        found = json.loads(told.splitlines()[-1])
    except (ValueError, IndexError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= {"verifiers", "found", "version"}:
        said = told.decode(errors="replace").strip()[-PROBE_QUOTED:] or f"nothing within {within_s:g} s"
        raise ValueError(f"{python} cannot tell what it has installed: {said}")
    return found


def _plain(version: str) -> str:
    """`1.2.0` -> `1.2`"""
    return re.sub(r"(\.0)+$", "", version)


def _environment(python: str) -> dict[str, str]:
    """Return the variables of a process of that interpreter: no credentials of the env worker."""
    kept = {
        name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_BEGINNINGS)
    }
    ours = str(Path(sys.executable).parent)  # contains uv, which its harnesses call
    path = [str(Path(shutil.which(python) or python).parent), kept.get("PATH", os.defpath), ours]
    return {**kept, "PATH": os.pathsep.join(path)}


class VerifiersProcess:
    """The process of one environment and the episodes that it plays."""

    _running: dict[str, VerifiersProcess] = {}  # noqa: RUF012 - one per environment in this process, for all its episodes

    def __init__(self, config: Verifiers.Config) -> None:
        self.gone = ""
        """Why the process has ended; empty while it runs."""
        self.idle_s = 120.0
        self.cancel_s = 10.0
        """A process that does not end a cancelled episode within this time blocks all episodes and is killed."""
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._life = self._loop.create_task(self._live())

    @classmethod
    def of(cls, config: Verifiers.Config) -> VerifiersProcess:
        """Return the process of the environment, starting one if needed."""
        key = config.model_dump_json()
        runner = cls._running.get(key)
        if runner is None or runner.gone or runner._loop is not asyncio.get_running_loop():
            runner = cls._running[key] = cls(config)
        return runner

    async def play(self, asked: Json) -> Json:
        """Play one episode. Raise AgentError with verifiers' message if it fails."""
        number = next(self._numbers)
        coming: asyncio.Future[Json] = self._loop.create_future()
        self._waiting[number] = coming
        if self._idle is not None:
            self._idle.cancel()
        try:
            await asyncio.shield(self._ready)
            self._say({"run": number, **asked})
            reply = await asyncio.shield(coming)
        except asyncio.CancelledError:
            if not self._ready.done():
                del self._waiting[number]
            elif number in self._waiting:
                self._say({"cancel": number})
                self._loop.call_later(self.cancel_s, self._must_have_ended, number)
            raise
        if "error" in reply:
            raise AgentError(f"verifiers: {reply['error']}")
        return reply

    def kill(self, reason: str) -> None:
        self.gone = self.gone or reason
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    def _must_have_ended(self, number: int) -> None:
        if number in self._waiting:
            self.kill("it was killed because an episode could not be cancelled")

    def _say(self, noun: Json) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(noun).encode() + b"\n")

    async def _live(self) -> None:
        """Run the process from start to end, then fail the episodes that still wait for it."""
        problem = ""
        try:
            reader = await self._start()
            while line := await reader.readline():
                reply = json.loads(line)
                if "run" in reply:
                    self._handle_end(reply)
                elif "ready" in reply:
                    self._ready.set_result(None)
                else:
                    problem = reply["error"]
        except ConnectionError:
            pass  # the process has ended: see its exit status
        except (OSError, ValueError) as error:  # the process cannot be started, or a line is invalid or too long
            problem = f"{type(error).__name__}: {error}"
        finally:
            await self._finish(problem)

    async def _start(self) -> asyncio.StreamReader:
        near, far = socket.socketpair()
        python = self._config.python or sys.executable
        with far:
            self._process = await asyncio.create_subprocess_exec(
                *(python, str(RUNNER), str(far.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # into the log of the env worker
                pass_fds=[far.fileno()],
                env=_environment(python),
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=near, limit=LINE_BYTES)
        setup = self._config.model_dump(include={"args", "paths", "split", "client", "tokenizer", "rows"})
        self._say({"id": self._config.package, **setup, "key": API_KEY})
        return reader

    def _handle_end(self, reply: Json) -> None:
        coming = self._waiting.pop(reply["run"], None)
        if coming is not None and not coming.done():
            coming.set_result(reply)
        if not self._waiting:
            self._idle = self._loop.call_later(self.idle_s, self.kill, "idle")

    async def _finish(self, problem: str) -> None:
        if self._process is not None:
            kill_group(self._process.pid)
            status = await self._process.wait()
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            problem = problem or self.gone or how
        self.gone = problem
        if self._writer is not None:
            self._writer.close()
        log.info("verifiers_process_ended", environment=self._config.id, reason=problem, episodes=len(self._waiting))
        error = AgentError(f"the process of verifiers environment {self._config.id!r} ended: {problem}")
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for coming in waiting:
            if not coming.done():
                coming.set_exception(error)
                coming.exception()  # retrieved, so that asyncio does not log it where no episode waits
