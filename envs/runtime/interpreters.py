"""Environments played by another Python interpreter, because their libraries conflict with ours.

The operator sets it by environment (`env_interpreters`). The interpreter sees our package through a link in a directory
of this process; nothing is installed there, and no other package of this interpreter is visible. So it needs the
imports of a child process: msgspec, numpy and pydantic, in versions near ours.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from opentinker.envs.runtime.venv_overlay import package_dir
from opentinker.shared.types.errors import SpecError


class Interpreters:
    """Interpreters by environment. Raises SpecError for a setting that is no program."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        for name, path in paths.items():
            if not os.access(path, os.X_OK) or path.is_dir():
                problem = f"{path} is not a program on this machine; name the python of a virtual environment"
                raise SpecError.of(f"env_interpreters.{name}", str(path), problem)
        self._linked = tempfile.TemporaryDirectory(prefix="opentinker-") if paths else None
        if self._linked is not None:
            Path(self._linked.name, "opentinker").symlink_to(package_dir())

    def of(self, environment: str) -> str:
        """Return the path of an environment's interpreter; empty: this one."""
        path = self._paths.get(environment)
        return "" if path is None else str(path.absolute())

    @property
    def python_path(self) -> str:
        return "" if self._linked is None else self._linked.name

    def close(self) -> None:
        if self._linked is not None:
            self._linked.cleanup()
