"""The files of one episode and the state of its shell, which outlive the processes of its sandbox.

    data_dir/harbor/boxes/HOST~PID-RANDOM/NUMBER/{upper,work}    what was written, for each file system of the image

A fork is a copy of what was written; its processes start anew. So does a sandbox that the kernel or a limit has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker.envs.harbor.box import Answer, Box
from opentinker.envs.harbor.image import Image, Shell
from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.sandbox.limits import MIB, Limits
from opentinker.shared.sandbox.overlay_root import Overlay

if TYPE_CHECKING:
    from opentinker.envs.harbor.boxes import Boxes

HOST = os.uname().nodename.replace("~", "-")
DISK_POLL_S = 1.0
OUTPUT_BYTES = 20_000
MAX_VARIABLES = 64 * 1024
"""Characters of the shell's variables; beyond it they stay as they were."""


class Workspace:
    """Make it with `Boxes.take`, which has one ready if it can."""

    def __init__(self, boxes: Boxes, image: Image, limits: Limits, cpus: int, place: Path) -> None:
        self.image, self.place = image, place
        self.shell = image.shell
        self._boxes, self._limits, self._cpus = boxes, limits, cpus
        self._box: Box | None = None
        self._held = 0
        """Bytes on disk at the last look."""

    @classmethod
    def make(cls, boxes: Boxes, image: Image, limits: Limits, cpus: int) -> Workspace:
        """Blocking. Raises OSError."""
        one = cls(boxes, image, limits, cpus, boxes.episodes / f"{HOST}~{os.getpid()}-{uuid.uuid4().hex[:12]}")
        for number in range(len(image.places)):
            for name in ("upper", "work"):
                path = one.place / str(number) / name
                path.mkdir(parents=True)
                if os.geteuid() == 0:
                    os.chown(path, boxes.sandbox.root_uid, boxes.sandbox.root_uid)
        return one

    @property
    def overlays(self) -> list[Overlay]:
        home = self._boxes.home
        return [
            Overlay(mounted, tuple(Path(home, lower) for lower in lowers), self.place / str(number))
            for number, (mounted, lowers) in enumerate(self.image.places.items())
        ]

    @property
    def pids(self) -> list[int]:
        """The sandbox's first process outside, if one runs."""
        return [self._box.sandboxed.process.pid] if self._box is not None and self._box.alive else []

    async def started(self, materials: Mapping[str, Path] | None = None) -> Box:
        """Return the running sandbox, started if necessary. `materials` need a new one. Raises Unavailable, OSError."""
        if materials is not None:
            await self.stop()
        if self._box is None or not self._box.alive:
            boxes = self._boxes
            self._box = await Box.start(
                boxes.sandbox, boxes.interpreter, self.overlays, self._limits, boxes.processors(self._cpus),
                materials or {},
            )  # fmt: skip
        return self._box

    async def ask(self, op: str, **arguments: Any) -> Answer:
        """Raises BoxLost, BoxError; Unavailable and OSError if no sandbox can be started."""
        return await (await self.started()).ask(op, **arguments)

    async def run(self, command: str, timeout_s: float, shell: Shell | None = None) -> Answer:
        """Run a command in the episode's shell, or in another one, whose state is not kept. Raises as `ask`."""
        box = await self.started()
        given = shell or self.shell
        watching = asyncio.get_running_loop().create_task(self._watch_disk(box))
        try:
            answer = await box.ask(
                "run", timeout_s, command=command, cwd=given.cwd, variables=given.variables, limit_s=timeout_s,
                most=OUTPUT_BYTES,
            )  # fmt: skip
        finally:
            await cancel_and_wait(watching)
        if shell is None and answer.cwd is not None and answer.variables is not None:
            length = sum(len(name) + len(value) for name, value in answer.variables.items())
            self.shell = Shell(answer.cwd, answer.variables if length <= MAX_VARIABLES else self.shell.variables)
        return answer

    async def _watch_disk(self, box: Box) -> None:
        """Consumes nothing, produces the end of a sandbox that writes more than it may; waits for the next look. What
        was too much at an earlier look may stay, so that it can be removed."""
        most = max(self._limits.disk_mb * MIB, self._held)
        while True:
            await sleep(DISK_POLL_S)
            self._held = held = await asyncio.to_thread(self.written)
            if held > most:
                box.sandboxed.kill(f"it had written {held // MIB} MB; at most {self._limits.disk_mb} (storage_mb)")

    def written(self) -> int:
        """Bytes on disk. Blocking."""
        total = 0
        for folder, _, names in os.walk(self.place):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:  # removed since
                    continue
        return total

    def fork(self) -> Workspace:
        """Return another one with the same files and shell, without processes. Blocking. Raises OSError."""
        other = Workspace.make(self._boxes, self.image, self._limits, self._cpus)
        for number in range(len(self.image.places)):
            source, target = self.place / str(number) / "upper", other.place / str(number) / "upper"
            command = ["cp", "-a", "--reflink=auto", f"{source}/.", str(target)]
            copied = subprocess.run(command, capture_output=True, check=False)
            if copied.returncode:
                other.remove()
                raise OSError(copied.stderr.decode(errors="replace")[-500:])
        other.shell = self.shell
        return other

    async def stop(self) -> None:
        """End its processes; its files stay."""
        box, self._box = self._box, None
        if box is not None:
            await box.end("it is no longer needed")

    async def close(self) -> None:
        await self.stop()
        await asyncio.to_thread(self.remove)

    def remove(self) -> None:
        """Blocking."""
        remove(self.place)


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
