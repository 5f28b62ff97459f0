"""Sandboxes without any container engine: bubblewrap on overlays of directories.

data_dir/harbor/boxes/HOST~PID-TICKS-RANDOM/NUMBER/{upper,work}    what was written, for each file system of the image
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from opentinker.envs.harbor.box import RUNNER, SHARED, Box, Interpreter, connected
from opentinker.envs.harbor.image import TaskImage
from opentinker.envs.harbor.task import TaskMachine
from opentinker.envs.harbor.workspace import EPISODES, HOME, Workspace, is_abandoned, limits_of, new_place
from opentinker.shared.config import Settings
from opentinker.shared.runtime.reexec import below
from opentinker.shared.sandbox.limits import Limits
from opentinker.shared.sandbox.overlay_root import Overlay, OverlayRoot
from opentinker.shared.sandbox.sandbox import Sandbox


class OverlayRuntime:
    """Make it with `open`."""

    def __init__(self, sandbox: Sandbox, settings: Settings) -> None:
        self.sandbox, self.interpreter, self.settings = sandbox, Interpreter(), settings
        self.home = settings.data_dir.resolve() / HOME
        self._turn = itertools.count()

    @classmethod
    async def open(cls, settings: Settings) -> OverlayRuntime:
        """Raises Unavailable."""
        return cls(await Sandbox.open(settings), settings)

    def make(self, image: TaskImage, machine: TaskMachine) -> OverlayWorkspace:
        return OverlayWorkspace(self, image, limits_of(self.settings, machine), machine.cpus)

    def remove_stale(self) -> None:
        for old in (self.home / EPISODES).iterdir():
            if is_abandoned(old):
                remove(old)

    def processors(self, count: int) -> list[int]:
        """Return that many processors for a sandbox, others than the last one had where there are enough."""
        own = sorted(os.sched_getaffinity(0))
        first = next(self._turn) * count
        return [own[(first + number) % len(own)] for number in range(min(count, len(own)))]


class OverlayWorkspace(Workspace):
    def __init__(self, runtime: OverlayRuntime, image: TaskImage, limits: Limits, cpus: int) -> None:
        """Blocking. Raises OSError."""
        super().__init__(image, limits, new_place(runtime.home))
        self._runtime, self._cpus = runtime, cpus
        for number in range(len(image.places)):
            for name in ("upper", "work"):
                path = self._place / str(number) / name
                path.mkdir(parents=True)
                if os.geteuid() == 0:
                    os.chown(path, runtime.sandbox.root_uid, runtime.sandbox.root_uid)

    def layer(self, number: int) -> Path:
        """Return the directory with the changes to the image's file system of that number."""
        return self._place / str(number) / "upper"

    async def _start(self) -> Box:
        runtime = self._runtime
        overlays = [
            Overlay(mounted, tuple(Path(runtime.home, lower) for lower in lowers), self._place / str(number))
            for number, (mounted, lowers) in enumerate(self.image.places.items())
        ]
        root = OverlayRoot(overlays, {**runtime.interpreter.binds, SHARED: self.shared})
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        told = [str(number), str(number), json.dumps(self._limits.of_a_process())]
        argv = [*runtime.interpreter.argv, RUNNER, *told, json.dumps(runtime.processors(self._cpus))]
        try:
            with theirs:
                process = await runtime.sandbox.start_on(
                    root, argv, runtime.interpreter.variables, self._limits, number
                )
        except BaseException:
            ours.close()
            raise
        return await connected(process, ours)

    def _copy(self) -> OverlayWorkspace:
        other = OverlayWorkspace(self._runtime, self.image, self._limits, self._cpus)
        for number in range(len(self.image.places)):
            command = ["cp", "-a", "--reflink=auto", f"{self.layer(number)}/.", str(other.layer(number))]
            copied = subprocess.run(command, capture_output=True, check=False)
            if copied.returncode:
                other.remove()
                raise OSError(copied.stderr.decode(errors="replace")[-500:])
        return other

    def written(self) -> int:
        total = 0
        for number in range(len(self.image.places)):
            for folder, _, names in os.walk(self.layer(number)):
                for name in names:
                    with contextlib.suppress(OSError):  # removed since
                        total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total

    def pids(self) -> list[int]:
        if self._box is None or not self._box.alive:
            return []
        first = self._box.process.pid
        return [first, *below(first)]

    def remove(self) -> None:
        remove(self._place)


def remove(place: Path) -> None:
    """Remove what a workspace has left. Blocking."""
    for left in place.glob("*/work/work"):  # overlayfs leaves it without any permission
        left.chmod(0o700)
    shutil.rmtree(place, onerror=_open_and_retry)


def _open_and_retry(_: object, path: str, __: object) -> None:
    """Remove what its owner had closed to everybody, as an ordinary user."""
    parent = os.path.dirname(path)
    with contextlib.suppress(OSError):
        os.chmod(parent, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
