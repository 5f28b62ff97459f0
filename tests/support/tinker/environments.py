"""Environments with one version of Tinker's SDK each, and one with its cookbook too, made once on a machine and kept in
its cache."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

VERSIONS = ("0.13.1", "0.20.0", "0.26.2", "0.38.0")
"""The oldest that is served, and one of each form of the wire; see docs/tinker.md."""
COOKBOOK = "0.5.8"
CLIENT_RUN = Path(__file__).with_name("client_run.py")
"""A script for those interpreters."""
CACHE = Path(os.environ.get("OPENTINKER_SDK_CACHE", Path.home() / ".cache" / "opentinker-tests" / "tinker"))


def python_with(sdk: str) -> Path:
    """Return the interpreter of an environment that has this version of the SDK."""
    return _python(sdk, [f"tinker=={sdk}"])


def python_with_cookbook() -> Path:
    """Return the interpreter of an environment that has the SDK's newest version and the cookbook."""
    wanted = [f"tinker=={VERSIONS[-1]}", f"tinker-cookbook[math-rl]=={COOKBOOK}"]
    return _python(f"cookbook-{COOKBOOK}", wanted, torch=True)


def _python(name: str, wanted: list[str], *, torch: bool = False) -> Path:
    place = CACHE / name
    python, done = place / "bin" / "python", place / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}.lock").open("w") as lock:  # several test processes ask for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            uv = str(Path(sys.executable).with_name("uv"))
            subprocess.run([uv, "venv", "-q", "--seed", "--clear", "--python", sys.executable, str(place)], check=True)
            if torch:  # by pip, whose settings say where this machine's own build is, as in the Makefile
                ours = version("torch").partition("+")[0]
                subprocess.run([str(python), "-m", "pip", "install", "-q", f"torch=={ours}"], check=True)
            subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *wanted], check=True)
            done.touch()
    return python
