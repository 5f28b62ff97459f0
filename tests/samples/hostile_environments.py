"""An environment that does to its process what an environment should not, and says what it finds there.

Played as `tests.samples.hostile_environments:Hostile`; attacks on the machine itself are in attacks.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from opentinker.envs.base import EPISODE_VARIABLE, Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import Message

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


class Hostile(Environment):
    """Does `how` in its first turn; every message says what the process looks like."""

    blocking = True
    episodes: ClassVar[int] = 0
    held: ClassVar[list[Any]] = []

    class Config(EnvironmentConfig):
        how: str = "nothing"

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        seen = repr(look())
        Hostile.episodes += 1
        return [user(seen)]

    async def step(self, action: Action) -> Step:
        if action.turn == 0:
            BEHAVIOURS[self.config.how]()
        return Step(messages=[user(repr(look()))])


def look() -> dict[str, Any]:
    """Of the process, with what no episode may have changed for another job."""
    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "HOME": "HOME" in os.environ,
        "patched": [name for name, there in (("Random", random.Random), ("dumps", json.dumps)) if there is None],
        "threads": sum(not thread.daemon for thread in threading.enumerate()),
        "processes": [pid for pid in below(os.getppid()) if pid != os.getpid()],
        "episodes": Hostile.episodes,
    }


def patch() -> None:
    random.Random = None  # type: ignore[assignment,misc]
    json.dumps = None  # type: ignore[assignment]
    os.environ.clear()


def directory() -> None:
    os.chdir("/usr")


def thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


def daemon_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def processes() -> None:
    for _ in range(4):
        Hostile.held.append(subprocess.Popen(SLEEP))


def sessions_of_their_own() -> None:
    Hostile.held.append(subprocess.Popen(SLEEP, start_new_session=True))


def deaf_process() -> None:
    """It does not hear SIGTERM."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    one = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    Hostile.held.append(one)
    assert one.stdout is not None
    one.stdout.readline()


def forked() -> None:
    """As multiprocessing does it: nothing is executed."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def orphan() -> None:
    """A daemon: its parent has ended."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)


def fork_bomb() -> None:
    """Of 15 processes, in sessions of their own."""
    parent = os.getpid()
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
    if os.getpid() != parent:
        time.sleep(600)
        os._exit(0)


def shared_process() -> None:
    """For all episodes of the child: it does not bear the variable of one."""
    variables = {name: value for name, value in os.environ.items() if name != EPISODE_VARIABLE}
    Hostile.held.append(subprocess.Popen(SLEEP, env=variables))


def block() -> None:
    time.sleep(600)


def leave() -> None:
    os._exit(7)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def signal_parent() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


def system_exit() -> None:
    sys.exit(3)


def recursion() -> None:
    recursion()


def interrupt() -> None:
    raise KeyboardInterrupt


def generator_exit() -> None:
    raise GeneratorExit


def cancelled() -> None:
    raise asyncio.CancelledError


def descriptors() -> None:
    """All that there are, and they stay open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    while True:
        Hostile.held.append(os.open("/dev/null", os.O_RDONLY))


def memory() -> None:
    """More than it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError):  # a sandbox has less
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    Hostile.held.append(bytearray(2 << 30))


def nothing() -> None: ...


BEHAVIOURS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        nothing, patch, directory, thread, daemon_thread, processes, sessions_of_their_own, deaf_process, forked,
        orphan, fork_bomb, shared_process, block, leave, die, segfault, kill_parent, signal_parent, system_exit,
        recursion, interrupt, generator_exit, cancelled, descriptors, memory,
    )
}  # fmt: skip
