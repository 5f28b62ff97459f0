"""Runs chromedriver, and ends with it whatever browser it has started. browser_pool.py calls it:

browser_leash.py PARENT CHROMEDRIVER ARGV...

Whatever happens, no browser is left. If our parent dies, however that is, the kernel tells this process, which kills
all its descendants: orphans come to it, wherever they have hidden. If the group of the parent is killed, chromedriver
and the browser are in it, and this process, which has left it, clears up. What they write to disk lies in a directory
that is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    place = tempfile.mkdtemp(prefix="opentinker-browser-")

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    variables = os.environ | {"TMPDIR": place, "HOME": place, "XDG_CONFIG_HOME": place, "XDG_CACHE_HOME": place}
    try:
        driver = subprocess.Popen(argv, env=variables, preexec_fn=prepare)  # noqa: PLW1509 - there are none
        os.setsid()  # after the driver, which stays in the group of our parent
        while driver.poll() is None and signal.sigwait(ends) == signal.SIGCHLD:
            pass
    finally:
        end_descendants()
        shutil.rmtree(place, ignore_errors=True)
    os._exit(driver.returncode or 0)


def end_descendants() -> None:
    """Those of a process that is killed become ours: until there is none."""
    while True:
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    main()
