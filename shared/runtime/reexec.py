"""Ends uninterruptible work that is no longer wanted: the worker's process re-executes itself.

    reexec.py LEFT... -- ARGV...     kill what the process has started, remove what the patterns LEFT find, become ARGV

`begin_anew` replaces the process with this script, and the script replaces itself with the service. The pid stays the
same, so the process manager (`opentinker up`, systemd, a container engine, a launcher) sees no exit and counts no
crash, while the kernel frees everything the process held: threads, memory, GPUs, sockets, locks. Between the two steps
there is only one thread, so nothing that is killed or removed can come back. Like parent_death.py it imports little.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

FIRST = 3
"""Number of the first file that is not handed on: input, output and errors are."""
TIDY_S = 1.0
"""Time for the process that removes multiprocessing's named resources to end after we release it."""
DEAD_S = 5.0
"""Processes that do not die within this time hang in the kernel and are left to it."""
TIDIES = b"multiprocessing.resource_tracker"


def begin_anew(left: Sequence[str], argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """`left`: patterns (glob) of files and directories that the process would leave behind. `argv`: what it becomes; if
    empty it ends, with status 0. In the main thread alone: the kernel's parent-death signal stays with that one."""
    for name in os.listdir("/dev/fd"):
        if int(name) >= FIRST:
            with suppress(OSError):  # the listing's own descriptor, or one closed since
                os.set_inheritable(int(name), False)
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, *left, "--", *argv], dict(environment))


def own_argv() -> list[str]:
    """Return the command line with which this process was started."""
    return [sys.executable, *sys.orig_argv[1:]]


def below(pid: int) -> list[int]:
    """The processes that it has started, and theirs in turn; none where there is no /proc."""
    found: list[int] = []
    pids = [pid]
    while pids:
        try:
            threads = os.listdir(f"/proc/{pids[-1]}/task")
        except OSError:  # it has ended since
            threads = []
        parent, children = pids.pop(), []
        for thread in threads:
            with suppress(OSError), open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                children += [int(child) for child in file.read().split()]
        found += children
        pids += children
    return found


def kill_group(group: int) -> None:
    """Kill the processes of a group, if any is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_children(pid: int) -> None:
    """Kills and reaps."""
    began = time.monotonic()
    while (pids := below(pid)) and (waited := time.monotonic() - began) < DEAD_S:
        for child in pids:
            if waited > TIDY_S or TIDIES not in _command(child):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def remove(pattern: str) -> None:
    for path in glob.glob(pattern):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)


def main(arguments: list[str]) -> None:
    end = arguments.index("--")
    end_children(os.getpid())
    for pattern in arguments[:end]:
        remove(pattern)
    if argv := arguments[end + 1 :]:
        os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
