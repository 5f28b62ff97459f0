"""The limits of a sandbox, and measurement of what its processes hold together.

A memory cgroup, where there is one (cgroup.py), counts what cannot be observed (inodes, page tables, overhead of
buffers).
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

from opentinker.shared.config import Settings
from opentinker.shared.runtime.reexec import below

HOME = "/tmp"
MIB = 1 << 20
MAX_FILES = 20_000
"""In /tmp: each takes memory of the kernel, however small it is."""
DESCRIPTORS = 8
"""Times `open_files`: descriptors of all processes together."""
SIGNALS = 1024
"""Queued signals, timers included."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox."""

    memory_mb: int = 1024
    """Address space of each process, and what all of them hold together."""
    processes: int = 32
    """Processes and threads."""
    cpu_s: int = 3600
    """Processor time of each process."""
    disk_mb: int = 64
    """Size of /tmp, which is memory as well, and of each file."""
    open_files: int = 256
    """Per process; also the number of sockets of all processes together."""
    kernel_mb: int = 64
    """Kernel memory for its processes, where a cgroup counts it."""
    memory_setting: str = "sandbox_memory_mb"
    """Where memory_mb comes from, for messages."""

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        return cls(
            memory_mb=settings.sandbox_memory_mb,
            processes=settings.sandbox_processes,
            cpu_s=settings.sandbox_cpu_s,
            disk_mb=settings.sandbox_disk_mb,
            open_files=settings.sandbox_open_files,
        )

    def of_all(self) -> int:
        """Bytes for all processes together, with /tmp and with what the kernel keeps for them."""
        return (self.memory_mb + self.disk_mb + self.kernel_mb) * MIB

    def of_a_process(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_mb * MIB,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.disk_mb * MIB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": SIGNALS,
        }


def excess(pid: int, limits: Limits) -> str:
    """Return the limit that the process and its descendants exceed together; empty: none."""
    processes = [pid, *below(pid)]
    most = limits.memory_mb * MIB
    if sum(map(_held, processes)) > most and (held := sum(map(_share, processes))) > most:
        return f"its processes held {held // MIB} MB of memory; at most {limits.memory_mb} ({limits.memory_setting})"
    for place, size in ((HOME, limits.disk_mb * MIB), ("/dev/shm", MIB)):
        if max((_files(process, place, size) for process in processes), default=0) > MAX_FILES:
            return f"it had more than {MAX_FILES} files in {place}"
    if (sockets := _sockets(processes)) > limits.open_files:
        return f"its processes had {sockets} sockets; at most {limits.open_files} (sandbox_open_files)"
    most = DESCRIPTORS * limits.open_files
    if (opened := sum(_descriptors(process, limits) for process in processes)) > most:
        return f"its processes had {opened} open files; at most {most} ({DESCRIPTORS} times sandbox_open_files)"
    return ""


def _sockets(processes: list[int]) -> int:
    """Count the sockets of the sandbox's network namespace, including those without a descriptor, because each may hold
    a full buffer. The first processes are outside of it."""
    ours = os.stat("/proc/self/ns/net").st_ino
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{process}/ns/net").st_ino != ours:
                return int(_read(f"/proc/{process}/net/sockstat").split(maxsplit=3)[2])
    return 0


def _descriptors(pid: int, limits: Limits) -> int:
    """One that hides them, which it can from an ordinary user, counts as if it had all that it may have."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return limits.open_files
    except OSError:  # it has ended
        return 0


def _files(pid: int, place: str, size: int) -> int:
    """Count the files in the sandbox's directory of that size, as the process sees it. All processes see the same one,
    and any may end in between."""
    try:
        there = os.statvfs(f"/proc/{pid}/root{place}")
    except OSError:  # it has ended
        return 0
    its_own = there.f_blocks * there.f_frsize == size  # before bubblewrap is ready it is the machine's
    return there.f_files - there.f_ffree if its_own else 0


def _held(pid: int) -> int:
    """Bytes that it has in memory or has had moved to swap; what it shares with others counts for each of them."""
    try:
        return _kilobytes(r"Vm(?:RSS|Swap)", f"/proc/{pid}/status")
    except OSError:  # it has ended
        return 0


def _share(pid: int) -> int:
    """The same with its part of what it shares with others; slower."""
    try:
        return _kilobytes(r"(?:Swap)?Pss", f"/proc/{pid}/smaps_rollup")
    except OSError:  # it has ended, or the kernel does not tell
        return _held(pid)


def _kilobytes(names: str, path: str) -> int:
    return 1024 * sum(map(int, re.findall(rf"^{names}:\s+([0-9]+) kB", _read(path), re.MULTILINE)))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
