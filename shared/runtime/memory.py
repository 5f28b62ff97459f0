"""The memory that a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
OWN_STATUS, OWN_REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the machine's memory, or the lowest limit of this process's cgroups (a container) if it is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(text) for text in _limits(cgroups, own) if text.isdecimal())])  # "max": no limit


def reset_peak() -> None:
    """Begin a new measurement of `peak_bytes`, where the kernel allows it."""
    try:
        OWN_REFERENCES.write_text("5")
    except OSError:  # then the peak is that of the whole life of the process
        return


def peak_bytes() -> int:
    """Return the most memory that this process has used since `reset_peak`."""
    line = next(line for line in OWN_STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _limits(cgroups: Path, own: Path) -> Iterator[str]:
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            base, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        yield from (_text(place / name).strip() for place in (group, *group.parents) if place.is_relative_to(base))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a container does not see the cgroups above its own
        return ""
