"""Everything that an environment has started ends with its episode, and with its child process even if the keeper was
stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from opentinker.envs.runtime.child_process import Plain
from opentinker.shared.runtime.reexec import below
from tests.conftest import soon, until
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


async def test_what_a_stopped_keeper_keeps_is_killed_by_the_worker() -> None:
    process = await asyncio.create_subprocess_exec("sh", "-c", "setsid sleep 60 & wait", start_new_session=True)
    await until(lambda: any(os.getsid(pid) == pid for pid in below(process.pid)))
    kept = below(process.pid)
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    plain = Plain(process, kill_s=0.2)
    plain.kill("it is over")
    assert await soon(plain.wait()) == -signal.SIGKILL
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in kept))
