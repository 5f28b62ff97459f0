"""Environments whose module waits for a file while it is imported."""

from __future__ import annotations

import os
from importlib import invalidate_caches
from pathlib import Path

GATED = """
import os, time
from pathlib import Path
from tests.samples.env_samples import Counting

with Path({pids!r}).open("a") as pids:
    pids.write(f"{{os.getpid()}} ")
while {waits} and not Path({gate!r}).exists():
    time.sleep(0.01)

class Gated(Counting):
    blocking = {blocking}

    async def open(self, row, seed):
        while self.config.tag == "hang":
            time.sleep(0.01) if {blocking} else await __import__("asyncio").sleep(0.01)
        return await super().open(row, seed)
"""
"""An environment whose module waits for a file, and whose open may hang."""


class Gate:
    def __init__(self, directory: Path, *, blocking: bool, waits: str = "True") -> None:
        self.file, self._pids = directory / "gate", directory / "pids"
        name = f"gated_{'in_a_child' if blocking else 'here'}_{directory.name.replace('-', '_')}"
        self.environment = f"{name}:Gated"
        code = GATED.format(pids=str(self._pids), gate=str(self.file), blocking=blocking, waits=waits)
        write_module(directory, name, code)

    def importers(self) -> list[int]:
        """Processes that have begun to import it."""
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []


def write_module(directory: Path, name: str, code: str) -> None:
    (directory / f"{name}.py").write_text(code)
    invalidate_caches()


def alive_importers(gate: Gate) -> list[int]:
    """Processes other than this one that import it, or have, and have not ended."""
    return [pid for pid in gate.importers() if pid != os.getpid() and alive(pid)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
