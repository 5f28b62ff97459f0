"""Places on disk: what a user's text for a model or a data set means, and names that outlive a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

HUB_ID = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
HUB_PAGES = ("datasets", "models", "spaces")
"""Pages of the hub itself: nobody there has such a name."""
IMPOSSIBLE = Path("(a name that no file can have)")


def local_path(name: str, files: tuple[str, ...] = ()) -> Path | None:
    """The file or directory that `name` means, there or not; None if it is the id of a hub: `name` or `owner/name`.

    `files`: endings that only files have. Never raises; nothing is at the path of a name that no file can have.
    """
    if "\0" in name:
        return IMPOSSIBLE
    try:
        path = Path(name).expanduser()
        there = path.exists()
    except RuntimeError:  # no such user's home
        return Path(name)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return IMPOSSIBLE
        return Path(name).expanduser()  # a place that may not be looked at: whoever looks will say so
    return path if there or name.startswith(("/", ".", "~")) or name.endswith(files) or name.count("/") > 1 else None


def not_on_hub(name: str) -> str | None:
    """Why `name`, which `local_path` takes for the id of a hub, is none but a path at which nothing is; None if it can
    be one. Blocking."""
    owner, slash, _ = name.partition("/")
    here = Path.cwd()
    if slash and (near := _model_below(here, name)):
        return f"no directory {name} on the server; did you mean {near}?"
    if HUB_ID.fullmatch(name) and not (slash and (owner in HUB_PAGES or (here / owner).is_dir())):
        return None
    return f"no directory {name} on the server (relative paths begin at {here}); the hub's ids are OWNER/NAME"


def _model_below(here: Path, name: str) -> str | None:
    """The model directory of this name in one of the directories here, but for a server's own."""
    try:
        for place in sorted(here.iterdir()):
            if (place / name / "config.json").is_file() and not (place / "run" / "lock").exists():
                return str((place / name).relative_to(here))
    except OSError:
        return None
    return None


def file_system() -> str:
    """Equal for processes that see the same files by the same paths: one boot of a machine, one root directory. Empty
    where that cannot be told."""
    try:
        boot, root = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/").stat()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {root.st_dev} {root.st_ino}".encode()).hexdigest()[:32]


def write_durably(path: Path, data: bytes) -> None:
    """All of it is on the disk, though not yet its name."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """What was made, renamed or removed in it is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
