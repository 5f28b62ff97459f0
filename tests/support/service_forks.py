"""Starts services as forks of processes that have imported them, which saves each the imports: a second of processor
time, six with torch, ten with vLLM.

    root --fork--> template of a kind --fork--> fork server of a test process --fork--> service

One root serves all test processes of a run: xdist's controller starts it, and without xdist the test process. It
imports nothing; a template imports its modules when a test first asks for its kind. A test process and its server send
each other a line of JSON, over a Unix socket:

    START: module, environment, folder, log --> pid
    WAIT: process that has ended            --> its exit code

Servers die with their test process, templates with the root, and services with their server. Hashes of texts are the
same in all services of a run: tests of equal results in different processes need real ones (`Cluster(forked=False)`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson

from opentinker.shared.runtime.parent_death import hold_command, set_death_signal

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
"""Of every process that a test starts: this tree, wherever the package is installed from, and its `tests`."""
Kind = Literal["light", "torch", "vllm"]
KINDS: tuple[Kind, ...] = ("light", "torch", "vllm")
SERVICES = ("env_worker", "reference_forward", "rollout_worker", "scheduler", "trainer")
WITH_TORCH = ("reference_forward", "trainer")
OF_JOBS = (
    "opentinker.services.reference_forward.scorer",
    "opentinker.services.reference_forward.rewards",
    "opentinker.services.trainer.bank.shared_learners",
    "opentinker.services.trainer.distributed.rank_main",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What these two import with their first job that computes, torch above all: five seconds of processor time."""
ADDRESS = "SERVICE_FORKS"
"""Environment variable: of the root that serves all test processes of a run."""


class Fork:
    """A service; the part of subprocess.Popen that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)

    def poll(self) -> int | None:
        return self._result(0)

    def wait(self) -> int:
        code = self._result(None)
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _result(self, timeout_ms: int | None) -> int | None:
        if self.returncode is None and self._ended.poll(timeout_ms):
            self.returncode = self._server.exit_code(self.pid)
            os.close(self._pidfd)
        return self.returncode


class ForkRoot:
    """The process of which all others are forks. `address`: of its socket, in a directory of its own."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="service-forks-")
        self.address = f"{self._place.name}/root"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PYTHONPATH}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            argv = hold_command([sys.executable, "-m", __spec__.name, str(listener.fileno())])
            self._process = subprocess.Popen(
                argv, env=environment, pass_fds=[listener.fileno()], start_new_session=True
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._place.cleanup()


class ForkServer:
    """The test process's end of the connection. Calls block for milliseconds, the first one until all is imported."""

    def __init__(self, address: str, kind: Kind) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._connection.sendall(bytes([KINDS.index(kind)]))
        self._answers = self._connection.makefile("rb")
        self._lock = threading.Lock()

    def start(self, module: str, environment: dict[str, str], folder: Path, log: Path) -> Fork:
        pid = self._ask({"module": module, "environment": environment, "folder": str(folder), "log": str(log)})
        return Fork(self, pid)

    def exit_code(self, pid: int) -> int:
        """Return the code of a process that has ended; negative: by that signal."""
        return self._ask({"ended": pid})

    def _ask(self, request: dict[str, Any]) -> int:
        with self._lock:
            self._connection.sendall(orjson.dumps(request) + b"\n")
            line = self._answers.readline()
        assert line, "the fork server has ended"
        return int(line)

    def close(self) -> None:
        """Returns when the server has ended."""
        self._connection.shutdown(socket.SHUT_WR)
        self._answers.read()
        self._answers.close()
        self._connection.close()


@functools.cache
def fork_server(kind: Kind) -> ForkServer:
    """Return the one of this test process whose services have imported, beyond all services, nothing else, what
    computes with torch, or vLLM."""
    server = ForkServer(os.environ.get(ADDRESS) or _own_root().address, kind)
    atexit.register(server.close)
    return server


@functools.cache
def _own_root() -> ForkRoot:
    root = ForkRoot()
    atexit.register(root.close)
    return root


# --- in the root and its forks --------------------------------------------------------------------------------------


def take_connections(listener: socket.socket) -> NoReturn:
    """Hand each connection to the template of the kind that its first byte names."""
    templates: dict[Kind, socket.socket] = {}
    while True:
        connection, _ = listener.accept()
        with connection:
            first = connection.recv(1)
            if not first:  # the test process has ended meanwhile
                continue
            kind = KINDS[first[0]]
            if kind not in templates:
                templates[kind], theirs = socket.socketpair()
                if os.fork() == 0:
                    for ours in (listener, connection, *templates.values()):
                        ours.close()
                    _run(be_template, theirs, kind)
                theirs.close()
            socket.send_fds(templates[kind], [b"+"], [connection.fileno()])


def be_template(connections: socket.socket, kind: Kind) -> None:
    """Import what services of this kind share, then fork a server for each connection."""
    set_death_signal()
    gc.disable()  # imports take less time without
    for service in SERVICES:
        importlib.import_module(f"opentinker.services.{service}.service")
    if kind == "torch":
        for module in OF_JOBS:
            importlib.import_module(module)
    elif kind == "vllm":
        vllm_startup = importlib.import_module("opentinker.services.rollout_worker.engines.vllm_startup")
        vllm_startup.preload()
    gc.enable()
    gc.collect()
    gc.freeze()  # forks share what is there
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a server has ended
    while numbers := socket.recv_fds(connections, 1, 1)[1]:
        if os.fork() == 0:
            connections.close()
            _run(serve, socket.socket(fileno=numbers[0]))
        os.close(numbers[0])


def serve(connection: socket.socket) -> None:
    set_death_signal()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection, connection.makefile("rb") as requests:
        for line in requests:
            request = orjson.loads(line)
            if "ended" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    requests.close()
                    connection.close()
                    become(**request)
            connection.sendall(b"%d\n" % answer)


def _run(role: Callable[..., None], *arguments: Any) -> NoReturn:
    """Play a role in this process, a fork, until its end."""
    try:
        role(*arguments)
    except BaseException:  # noqa: BLE001 - a process ends with its traceback
        traceback.print_exc()
    os._exit(1)


def become(module: str, environment: dict[str, str], folder: str, log: str) -> NoReturn:
    """Run `python -m MODULE` in this process, a fork."""
    code = 1
    try:
        set_death_signal()
        os.setsid()
        os.chdir(folder)
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
            os.dup2(os.open(path, flags, 0o644), number)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.orig_argv[:] = [sys.executable, "-m", module]
        sys.argv[:] = [module]
        sys.path[0] = folder
        sys.path += [place for place in environment["PYTHONPATH"].split(os.pathsep) if place not in sys.path]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a process ends with its traceback
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    take_connections(socket.socket(fileno=int(sys.argv[1])))
