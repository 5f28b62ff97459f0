"""Root file systems that sandboxed programs may change: overlays of read-only layers below a directory for the writes.

The kernel mounts them inside the sandbox's user namespace, so an ordinary user may too. Sandboxes on such a root run
as user 0 inside, one user of this machine outside (`Sandbox.root_uid`): what one of them leaves is the next one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.shared.sandbox.limits import MIB


@dataclass(frozen=True)
class Overlay:
    place: str
    """Where it is mounted."""
    lowers: tuple[Path, ...]
    """Read-only directories, the lowest first."""
    writes: Path
    """A directory with `upper` and `work`, which belong to the sandbox's user."""

    def plan(self) -> dict[str, object]:
        return {"place": self.place, "lowers": [str(lower) for lower in self.lowers], "writes": str(self.writes)}


@dataclass(frozen=True)
class OverlayRoot:
    overlays: Sequence[Overlay]
    """The first one is the root directory."""
    binds: Mapping[str, str | Path] = field(default_factory=dict)
    """Path inside -> file or directory, read-only."""


def root_options(namespaces: Sequence[str], no_device: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's options for a program on such a root."""
    named = [word for name, value in variables.items() for word in ("--setenv", name, value)]
    return [
        *namespaces, "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--clearenv", *named, "--hostname", "sandbox",
        "--proc", "/proc", "--dev", "/dev", "--ro-bind", *no_device, "--size", str(MIB), "--tmpfs", "/dev/shm",
        "--remount-ro", "/proc", "--remount-ro", "/dev", "--chdir", "/", "--",
    ]  # fmt: skip
