"""Places on disk: what a user's text for a model or a data set means, and files that outlive a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HUB_ID = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
HUB_PAGES = ("datasets", "models", "spaces")
"""Pages of the hub itself, which cannot be owners."""
IMPOSSIBLE = Path("(a name that no file can have)")
SYNC_THREADS = 8
BLANK = b"\0 \t\r\n"
"""Contents of a file that was not synced before a power cut."""


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
        return Path(name).expanduser()  # an unreadable place: the reader reports it
    return path if there or name.startswith(("/", ".", "~")) or name.endswith(files) or name.count("/") > 1 else None


def not_on_hub(name: str) -> str | None:
    """Explain why `name`, which `local_path` takes for a hub id, can only be a path at which nothing exists; None if it
    can be a hub id. Blocking."""
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


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes `data` and waits for the disk; the name is durable once the directory is synced."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Waits until the content of a file that somebody else wrote is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that entries made, renamed or removed in it are on disk."""
    sync_file(directory)


def sync_tree(directory: Path) -> None:
    """Waits until every file and directory below `directory`, and its own entries, are on the disk.

    In several threads: a journal takes many waiting files in one write, and is some thirty times faster with them.
    """
    folders = list(os.walk(directory))
    files = [path for folder, _, names in folders for name in names if not (path := Path(folder, name)).is_symlink()]
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(sync_file, [*files, *(Path(folder) for folder, _, _ in folders)]))


def make_directories(directory: Path, mode: int = 0o777) -> None:
    """Makes a directory with its parents; the name of each one made is on the disk. `mode`: of the directory itself."""
    made = []
    for place in (directory, *directory.parents):
        if place.exists():
            break
        made.append(place)
    directory.mkdir(parents=True, exist_ok=True, mode=mode)
    for place in reversed(made):
        sync_directory(place.parent)


def replace_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces the content of `path`, or makes it: after a power cut the file is whole, the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    write_durably(temporary, data, mode)
    temporary.replace(path)
    sync_directory(path.parent)


def create_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Makes a new file, on the disk with its name. Raises FileExistsError if there is one with content, also if another
    process has just made it: an empty file is what a power cut left of an earlier try, and counts as missing."""
    import fcntl  # not on Windows, where clients run

    if not is_blank(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with open(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.read().strip(BLANK):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.fchmod(file.fileno(), mode)
        file.seek(0)
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def is_blank(path: Path) -> bool:
    """Return whether the file is missing or blank, as a power cut leaves files that were not synced."""
    try:
        return not path.read_bytes().strip(BLANK)
    except FileNotFoundError:
        return True
