"""Keeps processes from outliving whoever started them. A script run between fork and exec: it imports almost nothing.

    parent_death.py hold PARENT ARGV...   become ARGV, killed by the kernel the moment PARENT dies
    parent_death.py guard                 read `+GROUP` / `-GROUP` lines; at end of input kill every process group still
    listed

`hold` covers the process itself, `guard` also covers what that process has started in turn (an engine's subprocess).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def hold(parent: int, argv: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127)


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
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]), sys.argv[3:])
    else:
        guard()
