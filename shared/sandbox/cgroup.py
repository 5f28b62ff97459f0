"""Memory cgroups for sandboxes: the kernel then counts what it keeps for their processes itself (socket buffers, pipes,
inodes, page tables), and ends what goes beyond the limit, however fast.

Only where this service may make cgroups: as root, or where one is delegated to it. Version 1: below our cgroup of the
memory controller. Version 2: below our cgroup if it delegates the controller, otherwise next to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from opentinker.shared.asyncio_tools import sleep

PREFIX = "opentinker-sandbox-"
POLL_S = 0.01
EMPTY_S = 2.0
"""Time for a killed sandbox's last process to end; after that its cgroup is left to the next service."""


@dataclass(frozen=True)
class Cgroups:
    parent: Path
    version: int

    @classmethod
    def find(cls) -> Cgroups | None:
        """Return the cgroup below which sandboxes are counted; None if there is no memory controller that this service
        may use. Removes leftovers of killed services."""
        for parent, version in _places():
            for old in parent.glob(f"{PREFIX}*"):
                if not Path("/proc", old.name.removeprefix(PREFIX).partition("-")[0]).exists():
                    _remove(old)
            found = cls(parent, version)
            with contextlib.suppress(OSError):
                _remove(found.make(1 << 30).path)
                return found
        return None

    def make(self, most: int) -> Cgroup:
        """Create the cgroup of one sandbox with a limit in bytes. Raises OSError."""
        path = self.parent / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        try:
            if self.version == 1:
                (path / "memory.limit_in_bytes").write_text(str(most))
                for name in ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"):
                    if (path / name).exists():  # swap, and TCP buffers, which version 1 counts apart if the kernel can
                        with contextlib.suppress(OSError):
                            (path / name).write_text(str(most))
            else:
                (path / "memory.max").write_text(str(most))
                (path / "memory.oom.group").write_text("1")
                if (path / "memory.swap.max").exists():
                    (path / "memory.swap.max").write_text("0")
        except OSError:
            _remove(path)
            raise
        return Cgroup(path, path / ("memory.oom_control" if self.version == 1 else "memory.events"))


@dataclass(frozen=True)
class Cgroup:
    path: Path
    events: Path

    def exceeded(self) -> bool:
        """Return whether the kernel has ended a process of the cgroup."""
        try:
            counted = re.search(r"^oom_kill (\d+)", self.events.read_text(), re.MULTILINE)
        except OSError:  # somebody has removed it
            return False
        return counted is not None and counted[1] != "0"

    async def remove(self) -> None:
        """Once its last process is gone."""
        for _ in range(int(EMPTY_S / POLL_S)):
            if _remove(self.path):
                return
            await sleep(POLL_S)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process of it is ending
        return False
    return True


def _places() -> list[tuple[Path, int]]:
    """Return the directories where cgroups of the memory controller could be made, each with its version."""
    own = {}
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found: list[tuple[Path, int]] = []
    for line in _lines("/proc/self/mountinfo"):
        fields, _, filesystem = line.partition(" - ")
        root, mounted = fields.split()[3:5]
        kind, _, options = filesystem.split(maxsplit=2)
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            found.append((_below(mounted, root, own["memory"]), 1))
        elif kind == "cgroup2" and "" in own:
            place = _below(mounted, root, own[""])
            candidates = [place] if place == Path(mounted) else [place, place.parent]
            found += [(one, 2) for one in candidates if _hands_down(one)]
    return found


def _below(mounted: str, root: str, path: str) -> Path:
    """The directory of a cgroup in a mount that shows `root` and what is below."""
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return Path(mounted, inside.lstrip("/"))


def _hands_down(place: Path) -> bool:
    """Return whether cgroups below have the memory controller. A user to whom it is delegated must enable it below; the
    directories of root are not changed."""
    control = place / "cgroup.subtree_control"
    if "memory" in " ".join(_lines(str(control))).split():
        return True
    if os.geteuid() == 0 or not os.access(control, os.W_OK):
        return False
    try:
        control.write_text("+memory")
    except OSError:  # it has processes, or the controller is missing
        return False
    return True


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
