"""Processes of an episode are known as its own from the moment they exist."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.cluster import PYTHONPATH

FORKS = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))  # on a busy machine it has not run yet
from opentinker.envs.runtime.episode_cleanup import Leftovers
leftovers, before = Leftovers(), open("/proc/self/comm").read()
with leftovers.of("an episode"):
    forked = os.fork()
    assert open("/proc/self/comm").read() == before
leftovers.end("an episode")
print(os.path.exists(f"/proc/{forked}"))
if os.path.exists(f"/proc/{forked}"):
    os.kill(forked, signal.SIGKILL)
"""


def test_a_forked_process_that_has_not_run_yet_ends_with_its_episode() -> None:
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
