"""Places on disk: what a user's text for a model or a data set means, and names that outlive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
