"""Starts services as forks of a process that has imported them all, which saves each a second of imports.

    test process --START: module, environment, folder, log--> fork server --fork--> service
                 --WAIT: process that has ended-->                        --waitpid--> its exit code

A line of JSON each way, over a Unix socket. The server dies with the test process, and its services with it. Hashes of
texts are the same in all its services: tests of equal results in different processes need real ones (`Cluster(forked=
False)`).
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
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import orjson

from opentinker.shared.runtime.parent_death import hold_command, set_death_signal

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


class ForkServer:
    """The test process's end of the connection. Calls block for milliseconds, the first one until all is imported."""

    def __init__(self, environment: dict[str, str], modules: Iterable[str]) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                hold_command(argv), env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
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
        assert line, f"the fork server has ended: {self._process.wait()}"
        return int(line)

    def close(self) -> None:
        self._answers.close()
        self._connection.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def fork_server(*, torch: bool) -> ForkServer:
    """Return the one of this test process; with torch: a second one, which has imported what computes too."""
    from tests.support.cluster import PYTHONPATH

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PYTHONPATH}
    modules = [f"opentinker.services.{service}.service" for service in SERVICES]
    server = ForkServer(environment, [*modules, *(OF_JOBS if torch else ())])
    atexit.register(server.close)
    return server


# --- in the fork server ---------------------------------------------------------------------------------------------


def serve(connection: socket.socket, modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks share what is there
    with connection.makefile("rb") as requests:
        for line in requests:
            request = orjson.loads(line)
            if "ended" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    become(**request)
            connection.sendall(b"%d\n" % answer)


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
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
