"""An ext4 file system of its own in a file, which can lose its power: nothing reaches it from that moment on, and what
the kernel had not written yet is lost. For root, where loop devices are."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
NO_LOG_FLUSH = 2
OPTIONS = ("commit=1,noauto_da_alloc", "commit=1", "commit=30,noauto_da_alloc", "commit=5")
"""How soon names are durable, and whether ext4 writes a file's data when it is renamed over another."""
FREE_S = 60.0


def unavailable() -> str:
    """Return why there can be none here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may mount"
    absent = [tool for tool in ("mkfs.ext4", "mount", "umount", "losetup") if shutil.which(tool) is None]
    if absent:
        return f"there is no {', '.join(absent)}"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


class CutDisk:
    def __init__(self, image: Path, at: Path, size_mb: int = 2048) -> None:
        self._image, self.at = image, at
        at.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(size_mb << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)

    def mount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"loop,{options}", str(self._image), str(self.at)], check=True)

    def cut(self) -> None:
        descriptor = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Once nobody has a file open any more, nor a sandbox the file system; it may be unmounted already."""
        deadline = time.monotonic() + FREE_S
        while self.at.is_mount() and (said := self._tool("umount", str(self.at))).returncode:
            assert time.monotonic() < deadline, said.stderr
            time.sleep(0.05)
        while self._tool("losetup", "--associated", str(self._image)).stdout:
            assert time.monotonic() < deadline, "somebody keeps the file system"
            time.sleep(0.05)

    def _tool(self, *argv: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(argv, capture_output=True, check=False)
