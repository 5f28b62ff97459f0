"""Ends processes whose parent has died, by the kernel's parent-death signal (Linux; elsewhere only `guard` works).

Imported by processes that end themselves with their parent, and a script between fork and exec for programs that
cannot. The script imports nothing of ours, so it runs as a bare file with `-I -S`:

    parent_death.py hold PARENT ARGV...     become ARGV, killed by the kernel the moment PARENT dies
    parent_death.py contain PARENT ARGV...  run ARGV; when it ends or PARENT dies, kill every descendant
    parent_death.py guard                   read `+GROUP` / `-GROUP` lines; at end of input kill every process group
                                            still listed

`hold` covers the process itself. `guard` also covers the process groups that it has started (an engine's subprocess).
`contain` also covers descendants that left the group: orphans are reparented to it. What ARGV writes to its home or
temporary directory lies in a directory that is removed. If PARENT's process group is killed, ARGV dies with it and
`contain`, which has left the group, cleans up.

The signal follows the thread that forked: start children from a thread that lives as long as they may.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def hold_command(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` and is killed when this process dies."""
    return [*_script("hold"), str(os.getpid()), *argv]


def contain_command(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` and kills all its descendants when it ends or this process dies."""
    return [*_script("contain"), str(os.getpid()), *argv]


def guard_command() -> list[str]:
    """Return the command that reads process groups from stdin and kills them at end of input."""
    return _script("guard")


def _script(verb: str) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, verb]


def set_death_signal(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `by` to this process when its parent dies. Does nothing but on Linux."""
    _prctl(PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends. Does nothing but on Linux."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _end_with(parent: int, by: signal.Signals) -> None:
    set_death_signal(by)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def hold(parent: int, argv: list[str]) -> NoReturn:
    _end_with(parent, signal.SIGKILL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127)


def contain(parent: int, argv: list[str]) -> NoReturn:
    import shutil
    import subprocess
    import tempfile

    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    adopt_orphans()
    _end_with(parent, signal.SIGTERM)
    place = tempfile.mkdtemp(prefix="opentinker-contained-")

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        set_death_signal()

    variables = os.environ | {"TMPDIR": place, "HOME": place, "XDG_CONFIG_HOME": place, "XDG_CACHE_HOME": place}
    try:
        program = subprocess.Popen(argv, env=variables, preexec_fn=prepare)  # noqa: PLW1509 - one thread alone
        os.setsid()  # after the program, which stays in the group of our parent
        while program.poll() is None and signal.sigwait(ends) == signal.SIGCHLD:
            pass
    finally:
        _end_descendants()
        shutil.rmtree(place, ignore_errors=True)
    os._exit(program.returncode or 0)


def _end_descendants() -> None:
    """Kill children until none is left; the children of each killed one become ours."""
    while True:
        for child in _children():
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(entry))
        except OSError:  # it has ended
            continue
    return found


def guard() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line[0] == "+" else groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    match sys.argv[1]:
        case "hold":
            hold(int(sys.argv[2]), sys.argv[3:])
        case "contain":
            contain(int(sys.argv[2]), sys.argv[3:])
        case _:
            guard()
