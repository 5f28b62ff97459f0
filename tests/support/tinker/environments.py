"""Environments with one version of Tinker's SDK each, made once on a machine and kept in its cache."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.13.1", "0.20.0", "0.26.2", "0.38.0")
"""The oldest that is served, and one of each form of the wire; see docs/tinker.md."""
CLIENT_RUN = Path(__file__).with_name("client_run.py")
"""A script for those interpreters."""
CACHE = Path(os.environ.get("OPENTINKER_SDK_CACHE", Path.home() / ".cache" / "opentinker-tests" / "tinker"))


def python_with(version: str) -> Path:
    """Return the interpreter of an environment that has this version."""
    place = CACHE / version
    python, done = place / "bin" / "python", place / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{version}.lock").open("w") as lock:  # several test processes ask for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            uv = str(Path(sys.executable).with_name("uv"))
            subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(place)], check=True)
            subprocess.run([uv, "pip", "install", "-q", "--python", str(python), f"tinker=={version}"], check=True)
            done.touch()
    return python
