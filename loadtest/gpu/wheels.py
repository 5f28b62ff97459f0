"""Packs what the GPU suite needs besides a CUDA torch into one folder: `make gpu-wheels`.

    python -m loadtest.gpu.wheels [--folder runs/gpu-wheels] [--python 3.12] [--with numpy]

Wheels for Linux on x86-64 and that version of Python. Left out is what comes with torch, NumPy, and what the suite does
not import. Exit status 1 if they are larger than 60 MB together, unless `--with` asks for more: the copy of the
repository travels with them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.gpu.bootstrap import NEEDED, NOT_PACKED, WHEELS, normal

MOST_BYTES = 60_000_000
LEFT_OUT = re.compile(
    r"(torch|triton|setuptools|numpy|nvidia-(?!ml-py)|cuda-|sympy|networkx|mpmath|filelock|fsspec|typing-extensions|"
    r"sqlalchemy|greenlet|alembic|mako|hf-xet)"
)
"""What comes with torch, NumPy, and what other packages name but the suite does not import."""
EXTRA = sorted(NOT_PACKED - {"torch"})
"""Packages that are left out, and packed on demand."""
PLATFORMS = ("manylinux_2_5", "manylinux1", "manylinux_2_12", "manylinux2010", "manylinux_2_17", "manylinux2014",
             "manylinux_2_24", "manylinux_2_26", "manylinux_2_27", "manylinux_2_28", "manylinux_2_34")  # fmt: skip


def requirements(python: str, without: Sequence[str] = (), extra: Sequence[str] = ()) -> list[str]:
    """Return exact versions of all packages, without those that are left out. `extra`: of these some that are not."""
    wanted = "\n".join(f"{name}>={lowest}" for name, lowest in NEEDED.items() if name != "torch")
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    where = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    found = subprocess.run([*uv, *where], input=wanted, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"uv cannot resolve the packages: {found.stderr.strip()}")
    exact = {normal(line.partition("==")[0]): line for line in found.stdout.split()}
    packed = [name for name in exact if name in extra or not LEFT_OUT.match(name)]
    return [exact[name] for name in packed if name not in without]


def pack(folder: Path, python: str, without: Sequence[str] = (), extra: Sequence[str] = ()) -> int:
    """Replace the folder's wheels. Returns their bytes together."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as built:
        for line in requirements(python, without, extra):
            download = [*pip, "download", "--no-deps", *target, "--dest", str(folder), line]
            if subprocess.run(download, capture_output=True, check=False).returncode == 0:
                continue
            made = [*pip, "wheel", "--no-deps", "--wheel-dir", built, line]  # published as source alone
            if subprocess.run(made, check=False).returncode:
                sys.exit(f"{line} has no wheel for Python {python}, and none can be built")
            (wheel,) = Path(built).iterdir()
            if not wheel.name.endswith("-none-any.whl"):
                sys.exit(f"{line} would be built for this machine's Python")
            shutil.move(wheel, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=WHEELS)
    parser.add_argument("--python", default="3.12", help="version of the Python that has the CUDA torch")
    parser.add_argument("--without", nargs="*", default=[], help="packages that the other Python has already")
    parser.add_argument(
        "--with", nargs="*", default=[], dest="extra", choices=EXTRA, help="packages to add: it lacks them"
    )
    options = parser.parse_args()
    total = pack(options.folder, options.python, [normal(name) for name in options.without], options.extra)
    count = len(list(options.folder.iterdir()))
    print(f"{count} wheels for Python {options.python} in {options.folder}: {total / 1e6:.1f} MB")
    if total > MOST_BYTES and not options.extra:
        sys.exit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
