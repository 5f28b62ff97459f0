"""Runs in a sandbox: a warm interpreter that forks for every program. Imports nothing of ours.

    python sandbox_runner.py FD

Consumes frames from the socket FD (four bytes of length, then JSON: code, timeout_s, most bytes of output), produces
one per program (length, one byte: 0 it failed, 1 it ended well, then its output); waits for the next one. After every
program its processes and files are removed, and the process for the next program is forked.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
import traceback

HEAD = struct.Struct("<I")
NAME = "<program>"
SAYING, GOOD = 3, b"\1"


def main() -> None:
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401 - so that programs need not wait for it
    with contextlib.suppress(ImportError):
        import sympy  # type: ignore[import-untyped]  # noqa: F401
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page that the fork has shared
    with socket.socket(fileno=int(sys.argv[1])) as service, service.makefile("rb") as requests:
        child = ProgramChild(service)
        service.sendall(HEAD.pack(0))  # ready
        while len(head := requests.read(HEAD.size)) == HEAD.size:
            good, output = child.play(requests.read(HEAD.unpack(head)[0]))
            service.sendall(HEAD.pack(1 + len(output)) + (b"\1" if good else b"\0") + output)
            child.reap()
            clean()
            child = ProgramChild(service)


class ProgramChild:
    """A process that waits for its only program, forked in advance."""

    def __init__(self, service: socket.socket) -> None:
        request, self._request = os.pipe()
        self._output, writing = os.pipe()
        self._status, saying = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            service.close()
            os.close(self._request)
            with os.fdopen(request, "rb") as coming:
                told = json.load(coming)
            run(told["code"], writing, saying, told["timeout_s"])
        for descriptor in (request, writing, saying):
            os.close(descriptor)
        self._reaped = False

    def play(self, request: bytes) -> tuple[bool, bytes]:
        """Return whether the program succeeded within its time, and its output."""
        told = json.loads(request)
        with os.fdopen(self._request, "wb") as going:
            going.write(request)
        output, said, why = watch(self._pid, self._output, self._status, told["timeout_s"], told["most"])
        if not said and not why:  # it ended prematurely
            status = self.reap()
            said = GOOD if status == 0 else b""
            if os.WIFSIGNALED(status):
                why = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return said == GOOD and not why, output[: told["most"]] + (f"\n{why}".encode() if why else b"")

    def reap(self) -> int:
        """End it if necessary and return its status, once. Freeing a large interpreter takes a while."""
        if self._reaped:
            return 0
        self._reaped = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._output)
        os.close(self._status)
        return status


def watch(child: int, reading: int, saying: int, timeout_s: float, most: int) -> tuple[bytes, bytes, str]:
    """Return the output until the program ends, how it ended, and why it was given up. The program may have left
    processes that hold the pipes open."""
    ended = os.pidfd_open(child)
    output, due = b"", time.monotonic() + timeout_s
    open_ends = [reading, saying, ended]
    try:
        while True:
            left = due - time.monotonic()
            ready, _, _ = select.select(open_ends, [], [], max(0.0, left))
            if reading in ready:
                data = os.read(reading, 1 << 16)
                output += data
                if not data:
                    open_ends.remove(reading)
            elif saying in ready:
                said = os.read(saying, 1)
                if said:
                    return output, said, ""
                open_ends.remove(saying)
            elif ended in ready:
                return output, b"", ""
            if len(output) > most:
                return output, b"", f"ended: it printed more than {most} bytes"
            if left <= 0:
                return output, b"", f"ended: it took longer than {timeout_s:g} s"
    finally:
        os.close(ended)


def run(code: str, writing: int, saying: int, timeout_s: float) -> None:
    """Run the program in the child; never returns. It reports its result before its memory is freed."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.dup2(saying, SAYING, inheritable=False)
        os.closerange(SAYING + 1, 256)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.stdout
        seconds = int(timeout_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        evaluate(code)
        status = 0
    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - the program's own
        show(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(SAYING, b"\0" if status else GOOD)
    os._exit(status)


def evaluate(code: str) -> None:
    """Run the program and print the value of its last expression, as an interpreter does."""
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(tree, NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def show(error: BaseException) -> None:
    """Print the traceback from the program's first line on, without our frames."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != NAME:
        at = at.tb_next
    with contextlib.suppress(BaseException):
        sys.stdout.write("".join(traceback.format_exception(type(error), error, at, limit=-8)))


def clean() -> None:
    """Kill all processes except this one and the sandbox's first, and empty its writable directories."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
    for place in ("/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                path = os.path.join(place, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)


if __name__ == "__main__":
    main()
