"""The files of one episode and the state of its shell, which outlive the processes of its sandbox.

    Runtime.make --> Workspace --started--> Box --> box_runner.py in the sandbox
                        |-- OverlayWorkspace (overlays.py)    bubblewrap on overlays of directories
                        +-- DockerWorkspace (docker.py)       a container of the user's Docker engine

    data_dir/harbor/boxes/HOST~PID-TICKS-RANDOM/shared/    what its sandbox sees, read-only, as SHARED

A fork is a copy of the written files with new processes. A sandbox that the kernel or a limit has ended starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from opentinker.envs.harbor.box import Answer, Box, BoxLost
from opentinker.envs.harbor.image import Shell, TaskImage
from opentinker.envs.harbor.task import MAX_BYTES, MAX_FILES, TaskMachine
from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.config import Settings
from opentinker.shared.runtime.launched_processes import ticks_of
from opentinker.shared.sandbox.limits import MIB, Limits

HOME, EPISODES = "harbor", "boxes"
HOST = os.uname().nodename.replace("~", "-")
DISK_POLL_S = 1.0
LONGEST_S = 7 * 86_400.0
"""Age beyond which what another machine has left is removed: its name may never come back."""
OUTPUT_BYTES = 20_000
MAX_VARIABLES = 64 * 1024
"""Characters of the shell's variables; beyond it they stay as they were."""


class Runtime(Protocol):
    """The source of sandboxes."""

    home: Path
    """data_dir/harbor"""

    def make(self, image: TaskImage, machine: TaskMachine) -> Workspace:
        """Return one whose sandbox is not started. Blocking. Raises OSError."""
        ...

    def remove_stale(self) -> None:
        """Remove what processes of this machine that were killed have left. Blocking. Raises OSError."""
        ...


class Workspace(ABC):
    """Make it with `Boxes.take`, which has one ready if it can."""

    def __init__(self, image: TaskImage, limits: Limits, place: Path) -> None:
        self.image, self.shell = image, image.shell
        self._limits, self._place = limits, place
        self._box: Box | None = None
        self._over = 0
        """Bytes on disk since they are too many: that much may stay, so that it can be removed; 0: they are not."""
        self._has_just_been_over = False
        """`_over` is what it holds when it has ended, since it writes on until then."""
        self._watching: asyncio.Task[None] | None = None
        self.shared.mkdir(parents=True)
        self.shared.chmod(0o755)

    @property
    def shared(self) -> Path:
        """A directory of this machine that the sandbox sees as box.SHARED."""
        return self._place / "shared"

    @property
    def is_running(self) -> bool:
        """Return whether the sandbox is started."""
        return self._box is not None and self._box.alive

    @abstractmethod
    async def _start(self) -> Box:
        """Start the sandbox. Raises Unavailable, OSError."""

    @abstractmethod
    def _copy(self) -> Self:
        """Return another one with the same files. Blocking. Raises OSError."""

    @abstractmethod
    def written(self) -> int:
        """Bytes on disk. Blocking."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The sandbox's processes outside, of which the first holds the others, if it runs. Blocking."""

    @abstractmethod
    def remove(self) -> None:
        """Remove its files. Blocking."""

    async def started(self) -> Box:
        """Return the running sandbox, started if necessary. Raises Unavailable, OSError."""
        if self._box is not None and not self._box.alive:
            await self._forget()
        if self._has_just_been_over:
            self._over, self._has_just_been_over = await asyncio.to_thread(self.written), False
        if self._box is None:
            self._box = await self._start()
            self._watching = asyncio.get_running_loop().create_task(self._watch_disk(self._box))
        return self._box

    async def restart(self, folders: Mapping[str, Path]) -> None:
        """End its processes and start the sandbox, which sees copies of these folders by their names below SHARED until
        it is stopped. Raises Unavailable, OSError."""
        await self.stop()
        await asyncio.to_thread(_share, self.shared, folders)
        await self.started()

    async def ask(self, op: str, **arguments: Any) -> Answer:
        """Raises BoxLost, also for a sandbox that has ended since the last request; BoxError; Unavailable and OSError
        if no sandbox can be started."""
        if self._box is not None and not self._box.alive:
            lost = await self._box.lost()
            await self._forget()
            raise lost
        try:
            return await (await self.started()).ask(op, **arguments)
        except BoxLost:
            await self._forget()
            raise

    async def run(self, command: str, timeout_s: float, shell: Shell | None = None) -> Answer:
        """Run a command in the episode's shell, or in another one, whose state is not kept. Raises as `ask`."""
        given = shell or self.shell
        answer = await self.ask(
            "run", timeout_s=timeout_s, command=command, cwd=given.cwd, variables=given.variables, limit_s=timeout_s,
            most=OUTPUT_BYTES,
        )  # fmt: skip
        if shell is None and answer.cwd is not None and answer.variables is not None:
            length = sum(len(name) + len(value) for name, value in answer.variables.items())
            self.shell = Shell(answer.cwd, answer.variables if length <= MAX_VARIABLES else self.shell.variables)
        return answer

    async def _watch_disk(self, box: Box) -> None:
        """Consumes nothing, produces the end of a sandbox that holds more on disk than it may; waits for the next look.
        Looks take a tenth of the time at most."""
        took_s = 0.0
        while box.alive:
            await sleep(max(DISK_POLL_S, 9 * took_s))
            began = time.monotonic()
            await self._look_at_disk(box)
            took_s = time.monotonic() - began

    async def _look_at_disk(self, box: Box) -> None:
        most = self._limits.disk_mb * MIB
        with contextlib.suppress(OSError):  # a file has gone, or the engine is busy: the next look tells
            held = await asyncio.to_thread(self.written)
            if held <= most:
                self._over = 0
            elif held <= self._over:
                self._over = held  # what has been removed may not come back
            else:
                box.process.kill(f"it had written {held // MIB} MB; at most {self._limits.disk_mb} (storage_mb)")
                self._has_just_been_over = not self._over

    def fork(self) -> Self:
        """Return another one with the same files and shell, without processes. Blocking. Raises OSError."""
        other = self._copy()
        other.shell, other._over, other._has_just_been_over = self.shell, self._over, self._has_just_been_over
        return other

    async def stop(self) -> None:
        """End its processes; its files stay, what it shared does not."""
        await self._forget()
        await asyncio.to_thread(_share, self.shared, {})

    async def _forget(self) -> None:
        """End the sandbox and what looks after it."""
        box, self._box = self._box, None
        watching, self._watching = self._watching, None
        if box is not None:
            await box.end("it is no longer needed")
        if watching is not None:
            await cancel_and_wait(watching)

    async def close(self) -> None:
        try:
            await self.stop()
        finally:
            await asyncio.to_thread(self.remove)


def new_place(home: Path) -> Path:
    """Return a directory for a workspace of this process, not made yet."""
    return home / EPISODES / f"{HOST}~{os.getpid()}-{ticks_of(os.getpid())}-{uuid.uuid4().hex[:12]}"


def is_stale(name: str) -> bool:
    """Return whether a place of that name belongs to a process of this machine that has ended. The process id may have
    been reused since: in a restarted container, even by this process. So the start time is compared too."""
    host, _, rest = name.partition("~")
    pid, _, ticks = rest.rpartition("-")[0].partition("-")
    return host == HOST and (not pid.isdigit() or str(ticks_of(int(pid))) != ticks)


def is_abandoned(place: Path) -> bool:
    """Return whether a place is unused: it is stale, or another machine's and older than episodes get. Blocking."""
    return is_stale(place.name) or (
        not place.name.startswith(f"{HOST}~") and time.time() - place.stat().st_mtime > LONGEST_S
    )


def limits_of(settings: Settings, machine: TaskMachine) -> Limits:
    return replace(
        Limits.of(settings),
        memory_mb=machine.memory_mb,
        disk_mb=machine.storage_mb,
        processes=settings.harbor_processes,
        memory_setting="environment.memory_mb of the task",
    )


def _share(shared: Path, folders: Mapping[str, Path]) -> None:
    """Replace what is shared by copies of these folders, readable for the sandbox's user."""
    for old in shared.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name, folder in folders.items():
        copy_readable(folder, shared / name)


def check_size(folder: Path) -> None:
    """Raise ValueError if a folder holds more than a task may, what cannot be copied, or cannot be read. No more is
    looked at than it may hold. Blocking."""
    count = size = 0
    left, looking = [str(folder)], str(folder)
    try:
        while left:
            with os.scandir(looking := left.pop()) as entries:
                for entry in entries:
                    count, looking = count + 1, entry.path
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        left.append(entry.path)
                    elif stat.S_ISREG(about.st_mode):
                        size += about.st_size
                    elif not stat.S_ISLNK(about.st_mode):
                        raise ValueError(f"{entry.path!r:.300} is neither a file nor a folder")
                    if count > MAX_FILES or size > MAX_BYTES:
                        raise ValueError(f"holds more than {MAX_FILES} files and folders or {MAX_BYTES >> 20} MB")
    except OSError as error:
        raise ValueError(f"{looking!r:.300} cannot be read: {error.strerror}") from None


def copy_readable(source: Path, target: Path) -> None:
    """Copy a folder so that everybody can read it and run its programs; links stay links. Blocking. Raises OSError."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    for folder, _, names in os.walk(target):
        os.chmod(folder, 0o755)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
