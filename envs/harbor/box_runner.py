"""Runs in a sandbox on a task's root file system: one request after the other. Imports nothing of ours.

    python box_runner.py IN OUT LIMITS CPUS

Consumes frames from descriptor IN (four bytes of length, then JSON), produces a JSON frame on OUT for each; waits for
the next one; ends with the connection. LIMITS and CPUS are JSON: resource limits by name, processor numbers. An answer
with `error` says why a request failed. Each command runs in a separate session, whose signals do not reach this
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO

HEAD = struct.Struct("<I")
STATE = 9
"""Descriptor to which the shell writes its directory and variables when it ends."""
FREE = 20
"""Descriptors from here on are taken for the connection, so STATE is free."""
WRAPPER = f"trap '{{ pwd -P; /usr/bin/env -0; }} >&{STATE} 2>/dev/null' EXIT; eval \"$1\""
STATE_BYTES = 1 << 17
DIGEST_FILES = 10_000


def main() -> None:
    if os.getpid() == 1:
        hold()
    given = [int(sys.argv[1]), int(sys.argv[2])]
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FREE) for descriptor in given]
    for descriptor in {*given, STATE}:  # connections of `relay` take no number that a shell needs
        hold_free(descriptor)
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, json.loads(sys.argv[4]))
    for name, limit in json.loads(sys.argv[3]).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.umask(0o022)
    with open(kept[0], "rb") as requests, open(kept[1], "wb") as answers:
        answer(answers, {})
        while len(head := requests.read(HEAD.size)) == HEAD.size:
            told = json.loads(requests.read(HEAD.unpack(head)[0]))
            try:
                done = OPERATIONS[told.pop("op")](**told)
            except OSError as error:
                done = {"error": f"{error.filename or 'it'}: {error.strerror or error}"}
            except ValueError as error:
                done = {"error": str(error)}
            answer(answers, done)


def hold() -> None:
    """Hold a container as its first process: let a child continue, reap ended processes, and end with the child."""
    child = os.fork()
    while child:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def hold_free(descriptor: int) -> None:
    """Have a descriptor stand for nothing, without being free for others."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def answer(answers: BinaryIO, done: dict[str, Any]) -> None:
    text = json.dumps(done).encode()
    answers.write(HEAD.pack(len(text)) + text)
    answers.flush()


# --- commands ---------------------------------------------------------------------------------------------------------


def run(command: str, cwd: str, variables: dict[str, str], limit_s: float, most: int) -> dict[str, Any]:
    """Run a command in the task's shell. Its background processes stay; what they print later is lost."""
    shell = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "/bin/sh")
    output, out = os.pipe()
    state, told = os.pipe()
    os.dup2(told, STATE)
    try:
        process = subprocess.Popen(
            [shell, "-c", WRAPPER, shell, command],
            cwd=cwd if os.path.isdir(cwd) else "/",
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=(STATE,),
        )
    finally:
        hold_free(STATE)
        for descriptor in (out, told):
            os.close(descriptor)
    try:
        kept, late = watch(process, output, limit_s, most)
        found = {"status": process.returncode, "output": kept.decode(errors="replace"), "late": late}
        return found | state_of(drain(state))
    finally:
        os.close(output)
        os.close(state)


def watch(process: subprocess.Popen[bytes], output: int, timeout_s: float, most: int) -> tuple[bytes, bool]:
    """Return what the command prints until it ends, without the middle beyond `most` bytes, and whether it was given
    up. Its background processes may hold the pipe open."""
    ended, due = os.pidfd_open(process.pid), time.monotonic() + timeout_s
    kept, late = Kept(most), False
    open_ends = [output, ended]
    try:
        while True:
            left = due - time.monotonic()
            ready, _, _ = select.select(open_ends, [], [], max(0.0, left))
            if output in ready:
                data = os.read(output, 1 << 16)
                kept.add(data)
                if not data:
                    open_ends.remove(output)
            elif ended in ready:
                break
            if left <= 0:
                late = True
                break
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if late:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept.add(drain(output))
    return kept.bytes(), late


class Kept:
    """The beginning and the end of an output."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first, self._last, self._left = b"", b"", 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if (over := len(self._last) - self._half) > 0:
            self._left += over
            self._last = self._last[over:]

    def bytes(self) -> bytes:
        note = f"\n... ({self._left:,} bytes are left out) ...\n".encode() if self._left else b""
        return self._first + note + self._last


def drain(pipe: int) -> bytes:
    """Return what a pipe holds now, up to a bound: a process may keep writing to it."""
    os.set_blocking(pipe, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while len(data) < STATE_BYTES and (more := os.read(pipe, 1 << 16)):
            data += more
    return data


def state_of(told: bytes) -> dict[str, Any]:
    """Return the shell's directory and variables, if it told them whole."""
    cwd, _, rest = told.partition(b"\n")
    if not cwd or not told.endswith(b"\0"):
        return {}
    pairs = [item.decode(errors="replace").partition("=") for item in rest.split(b"\0") if item]
    variables = {name: value for name, equals, value in pairs if equals and name not in ("_", "SHLVL", "PWD", "OLDPWD")}
    return {"cwd": cwd.decode(errors="replace"), "variables": variables}


# --- files ------------------------------------------------------------------------------------------------------------


def read(path: str, most: int) -> dict[str, Any]:
    """The file's text, at most that many bytes of it."""
    with open(path, "rb", opener=open_plainly) as file:
        size = os.fstat(file.fileno()).st_size
        return {"text": file.read(most).decode(errors="replace"), "size": size}


def open_plainly(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a named pipe. Raise ValueError for one, or a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: not a plain file")
    return descriptor


def write(path: str, text: str) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: not a plain file")
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return {}


def remove(path: str) -> dict[str, Any]:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    return {}


def copy(base: str, sources: list[str], target: str, directory: bool) -> dict[str, Any]:
    """Copy as a Dockerfile's COPY does: the contents of a directory go into the target; a file goes into it if it is a
    directory or there are several files."""
    found = [path for source in sources for path in sorted(glob.glob(os.path.join(base, source), include_hidden=True))]
    if not found:
        raise ValueError(f"nothing is named {', '.join(sources)} in the task's environment folder")
    directory = directory or len(found) > 1 or os.path.isdir(target)
    for path in found:
        if os.path.isdir(path):
            shutil.copytree(path, target, copy_function=shutil.copy, dirs_exist_ok=True)
        else:
            place = os.path.join(target, os.path.basename(path)) if directory else target
            os.makedirs(os.path.dirname(place), exist_ok=True)
            shutil.copy(path, place)
    return {}


def make(path: str) -> dict[str, Any]:
    os.makedirs(path, exist_ok=True)
    return {}


def digest(path: str) -> dict[str, Any]:
    """Digest names, modes and contents of the files below a directory, up to a number of them."""
    told, count = hashlib.sha256(), 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            place = os.path.join(folder, name)
            about = os.lstat(place)
            told.update(f"{place}\0{stat.S_IMODE(about.st_mode):o}\0".encode())
            if stat.S_ISREG(about.st_mode):
                with open(place, "rb") as file:
                    told.update(hashlib.file_digest(file, "sha256").digest())
            count += 1
            if count >= DIGEST_FILES:
                return {"digest": told.hexdigest()}
    return {"digest": told.hexdigest()}


def processes() -> dict[str, Any]:
    """Count the processes besides this one and the sandbox's first."""
    own = {1, os.getpid(), os.getppid()}
    return {"count": sum(name.isdigit() and int(name) not in own for name in os.listdir("/proc"))}


# --- the model --------------------------------------------------------------------------------------------------------


def relay(path: str) -> dict[str, Any]:
    """Pass connections to a port of loopback on to a Unix socket, as long as this process runs."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=pass_on, args=(listener, path), daemon=True).start()
    return {"count": listener.getsockname()[1]}


def pass_on(listener: socket.socket, path: str) -> None:
    while True:
        try:
            here, _ = listener.accept()
        except OSError:  # no descriptor is free: agents may hold all of them
            time.sleep(0.1)
            continue
        opened = [here]
        try:
            there = socket.socket(socket.AF_UNIX)
            opened.append(there)
            there.connect(path)
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=pump, args=(source, target), daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor is free; RuntimeError: no thread can be started
            for one in opened:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            one.shutdown(how)


FUNCTIONS = (run, read, write, remove, copy, make, digest, processes, relay)
OPERATIONS = {function.__name__: function for function in FUNCTIONS}

if __name__ == "__main__":
    main()
