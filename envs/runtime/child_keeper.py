"""Keeps a child process of the level `process`, so that every process an environment starts ends with it.

    python -m opentinker.envs.runtime.child_keeper FD MODULES      (started by child_process.py, never by hand)

Forks: the new process plays (child.py), this one adopts orphaned descendants, even those that left the session. When
the player ends, the env worker dies or sends SIGTERM, all descendants get SIGTERM and are killed soon after. The exit
status is the player's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from opentinker.envs.runtime import child
from opentinker.shared.runtime.parent_death import adopt_orphans
from opentinker.shared.runtime.reexec import below, end_children

GRACE_S = 1.0
"""Time for programs to clean up after SIGTERM; the player is killed immediately."""
POLL_S = 0.005
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    adopt_orphans()
    child.end_with_parent(signal.SIGTERM)
    player = os.fork()
    if player == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        child.main()
    else:
        os.close(int(sys.argv[1]))
        keep(player)


def keep(player: int) -> NoReturn:
    """Wait for the end of the player or SIGTERM, end all descendants and exit with the player's status."""
    status = None
    while status is None and signal.sigwait(SIGNALS) == signal.SIGCHLD:
        status = reap(player)
    if status is None:
        os.kill(player, signal.SIGKILL)
        _, status = os.waitpid(player, 0)
    for pid in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while below(os.getpid()) and time.monotonic() < until:
        time.sleep(POLL_S)
        reap(player)
    end_children(os.getpid())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        with contextlib.suppress(OSError):  # SIGKILL is what it is
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def reap(player: int) -> int | None:
    """Reap ended children. Return the player's status if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == player:
                status = ended[1]
    return status


if __name__ == "__main__":
    main()
